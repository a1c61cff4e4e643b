"""What a model keeps of a conversation, in bytes, counted before it is loaded.

The model's own class, of mlx-lm or mlx-vlm, is built from config.json and reads one token. MLX
computes nothing that nobody looks at, so this takes no weights and some hundredths of a second, and
yet the sizes of all arrays are known then. So there are no rules for families here: windows,
recurrent layers, layers that share KV, latent attention, and defaults that a config.json leaves out
are counted as the class has them. start-llm.py measures the same on the model that it has loaded
(measure_kv), and tests hold one to the other. why(L-180): the fields of config.json do not say it.
(What a class keeps beside them, as the index of Qwen3.8-Flash-Next, is not counted by token.)
"""

import importlib.util
from typing import Any, Final, NamedTuple

import mlx.core as mx
from mlx.utils import tree_map

PARTS: Final = ["text", "vision", "audio", "perceiver", "projector"]  # of a config


class KVBytes(NamedTuple):
    """What a model keeps of one conversation."""

    token: int  # for each token: the KV of layers that see all of them
    fixed: int  # once: windows, as long as they get, and states of recurrent layers


def count_kv_bytes(facts: dict[str, Any], dtype: mx.Dtype = mx.bfloat16) -> KVBytes:
    """What a model with this config.json keeps, if it computes in `dtype`.

    Whatever building it raises means that it cannot be loaded here.
    """

    def stand_in(weights: mx.array) -> mx.array:
        # One zero, seen in the shape of all weights: were it computed, it took no memory.
        is_number = mx.issubdtype(weights.dtype, mx.floating)
        zero = mx.zeros((), dtype if is_number else weights.dtype)
        return mx.broadcast_to(zero, weights.shape)

    # Here and below: importing them takes seconds, and few starts need it.
    from mlx_lm.models.cache import make_prompt_cache

    model = build_model(facts)
    model.update(tree_map(stand_in, model.parameters()))
    layer_caches = make_prompt_cache(model)
    # One token: of several, layers of mlx-vlm compute parts at once on a CPU.
    model(mx.array([[0]]), cache=layer_caches)

    token_bytes = fixed_bytes = 0
    for leaf in find_leaves(layer_caches):
        if not hasattr(leaf, "keys"):  # a recurrent layer, or a kind of its own
            fixed_bytes += leaf.nbytes
        elif leaf.keys is not None:
            place_bytes = leaf.nbytes // leaf.keys.shape[2]
            window = getattr(leaf, "max_size", 0) or getattr(leaf, "chunk_size", 0)
            if window:
                fixed_bytes += place_bytes * window
            else:
                token_bytes += place_bytes
    return KVBytes(token_bytes, fixed_bytes)


def build_model(facts: dict[str, Any]) -> Any:
    """The part of a model that reads text, with weights that are not computed.

    Raises ValueError if neither mlx-lm nor mlx-vlm has it.
    """
    from mlx_lm.utils import _get_classes

    try:
        model_class, args_class = _get_classes(facts)
    except ValueError:
        name = find_vision_module(facts)
        if not name:
            raise
    else:
        return model_class(args_class.from_dict(facts))

    from mlx_vlm.utils import update_module_configs

    module = importlib.import_module(name)
    plain = {"text_config": {}, **facts}
    sizes = module.ModelConfig.from_dict(plain)
    model = module.Model(update_module_configs(sizes, module, plain, PARTS))
    return getattr(model, "language_model", model)


def find_vision_module(facts: dict[str, Any]) -> str:
    """The module of mlx-vlm for a model with this config.json; "" if it has none."""
    from mlx_vlm.utils import get_model_type

    name = f"mlx_vlm.models.{get_model_type(facts)}"
    return name if importlib.util.find_spec(name) else ""


def find_leaves(layer_caches: list[Any]) -> list[Any]:
    """The caches of all layers; some have a list of several."""
    leaves: list[Any] = []
    for cache in layer_caches:
        leaves += find_leaves(cache.caches) if hasattr(cache, "caches") else [cache]
    return leaves
