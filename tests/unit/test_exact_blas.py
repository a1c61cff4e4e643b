"""The tests' BLAS has the bits of the reference, whatever stands beside a row."""

import ctypes
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from exact_blas import exact_blas, load_exact_blas, reference_blas

pytestmark = pytest.mark.skipif(
    load_exact_blas() is None, reason="no gcc, or MLX has no BLAS of its own"
)

# as cblas numbers them
ROW_MAJOR = 101
COLUMN_MAJOR = 102
PLAIN = 111
TRANSPOSED = 112
FLOATS = ctypes.POINTER(ctypes.c_float)


@dataclass
class Product:
    """What cblas_sgemm is told, but alpha."""

    order: int
    transposes: list[int]
    sizes: list[int]  # rows and columns of the product, and the length of its sums
    left: np.ndarray
    right: np.ndarray
    beta: float
    output: np.ndarray

    def computed_by(self, library):
        """The output afterwards; what was given stays as it was."""
        output = self.output.copy()
        library.cblas_sgemm(
            self.order,
            *self.transposes,
            *self.sizes,
            ctypes.c_float(1.0),
            *address(self.left),
            *address(self.right),
            ctypes.c_float(self.beta),
            *address(output),
        )
        return output


def address(matrix):
    """Where it begins, and how far a line is from the next."""
    return matrix.ctypes.data_as(FLOATS), matrix.shape[1]


def random_matrix(rng, n_rows, n_columns, *, lies_by_rows):
    """As it lies in memory, with up to two unused numbers behind each line."""
    n_lines = n_rows if lies_by_rows else n_columns
    length = n_columns if lies_by_rows else n_rows
    shape = (n_lines, length + rng.integers(3))
    return rng.standard_normal(shape, dtype=np.float32)


def random_product(seed):
    rng = np.random.default_rng(seed)
    order = ROW_MAJOR if seed % 2 else COLUMN_MAJOR
    transposes = rng.choice([PLAIN, TRANSPOSED], 2).tolist()
    largest_size = rng.choice([5, 40, 100])
    n_rows, n_columns, depth = rng.integers(1, largest_size, 3).tolist()

    plain_order = PLAIN if order == ROW_MAJOR else TRANSPOSED
    left_order, right_order = transposes
    left = random_matrix(rng, n_rows, depth, lies_by_rows=left_order == plain_order)
    right = random_matrix(
        rng, depth, n_columns, lies_by_rows=right_order == plain_order
    )
    output = random_matrix(rng, n_rows, n_columns, lies_by_rows=order == ROW_MAJOR)
    if seed % 7 == 0:
        left.flat[0] = np.inf
        right.flat[0] = 0.0

    sizes = [n_rows, n_columns, depth]
    beta = float(rng.choice([0.0, 1.0, 0.7]))
    return Product(order, transposes, sizes, left, right, beta, output)


def test_every_product_has_the_bits_of_the_reference():
    exact = ctypes.CDLL(str(exact_blas()))
    reference = ctypes.CDLL(str(reference_blas()))

    for seed in range(1500):
        product = random_product(seed)
        output = product.computed_by(exact)
        expected = product.computed_by(reference)

        # NaNs may differ in their sign
        is_number = ~np.isnan(expected)
        assert np.array_equal(~np.isnan(output), is_number), seed

        has_same_bits = output.view(np.int32) == expected.view(np.int32)
        assert has_same_bits[is_number].all(), seed


def test_mlx_computes_with_it():
    exact = ctypes.CDLL(str(exact_blas()))
    n_products = ctypes.c_ulong.in_dll(exact, "n_exact_products")
    n_before = n_products.value

    rows = mx.ones((3, 32))
    mx.eval(rows @ mx.ones((32, 5)))

    assert n_products.value == n_before + 1


def test_a_row_does_not_depend_on_those_beside_it():
    rng = np.random.default_rng(1)
    rows = mx.array(rng.standard_normal((70, 90)).astype(np.float32))
    weights = mx.array(rng.standard_normal((50, 90)).astype(np.float32))

    product = rows @ weights.T
    for n_rows in (1, 2, 3, 17, 69):
        part = rows[:n_rows] @ weights.T
        assert mx.array_equal(part, product[:n_rows]), n_rows
