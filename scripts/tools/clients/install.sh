#!/usr/bin/env bash
# Install coding agents from npm into $CLIENTS_HOME (default: ~/clients), for tests and checks.
#
#   scripts/tools/clients/install.sh [NAME ...]     default: node24 claude-code pi openclaw codex
#
# Names: node24 claude-code claude-code-2.1.150 pi openclaw openclaw-2026.2.17 codex copilot
# opencode qwen-code.
# Needs npm and no account; no install script of a package is run. About 1.8 GB for the default.
# On a Mac npm has no node 24: `brew install node@24` first. (bash 3.2 will do.)
set -euo pipefail
home=${CLIENTS_HOME:-$HOME/clients}

case $(uname -m) in arm64 | aarch64) chip=arm64 ;; *) chip=x64 ;; esac
platform=$(uname -s | tr '[:upper:]' '[:lower:]')-$chip # as npm names it: darwin-arm64

plain_manifest='{"private":true}'

find_node24() {
  for node in "$(command -v node || true)" {/opt/homebrew,/usr/local}/opt/node@24/bin/node; do
    case $("$node" --version 2>/dev/null || true) in v24.*) echo "$node" && return ;; esac
  done
  echo "node24: no node 24 in PATH; brew install node@24" >&2
  return 2
}

into() { # NAME PACKAGE...
  mkdir -p "$home/$1" && cd "$home/$1"
  [ -f package.json ] || echo "${manifest-$plain_manifest}" > package.json
  npm install --ignore-scripts --no-audit --no-fund --loglevel=error "${@:2}"
}

for name in "${@:-node24 claude-code pi openclaw codex}"; do for part in $name; do
  echo "== $part"
  case $part in
    node24) # OpenClaw wants node >= 24.16 < 25; `node` itself would need its install script
      if [ "${platform%-*}" = linux ]; then
        into node24-pkg "node-$platform@24.21.0"
        node="$home/node24-pkg/node_modules/node-$platform/bin/node"
      else
        node=$(find_node24)
      fi
      mkdir -p "$home/node24/bin"
      ln -sfn "$node" "$home/node24/bin/node" ;;
    claude-code) into "$part" @anthropic-ai/claude-code@2.1.332 ;;
    claude-code-*) into "$part" "@anthropic-ai/claude-code@${part#claude-code-}" ;;
    pi) into "$part" @earendil-works/pi-coding-agent@1.6.0 ;;
    openclaw) into "$part" openclaw@2026.9.6 ;;
    openclaw-2026.2.17) # two of its dependencies are no longer to be had
      mkdir -p "$home/stub" && echo '{"name":"libsignal","version":"1.0.0"}' > "$home/stub/package.json"
      overrides='{"libsignal":"file:../stub","linkedom":"0.18.12"}'
      manifest="{\"private\":true,\"overrides\":$overrides}" into "$part" openclaw@2026.2.17 ;;
    codex)
      into "$part" @openai/codex@0.171.0 "@openai/codex-$platform@npm:@openai/codex@0.171.0-$platform" ;;
    copilot) into "$part" @github/copilot@1.0.102 ;;
    opencode) into "$part" opencode-ai@1.18.33 "opencode-$platform@1.18.33" ;;
    qwen-code) into "$part" @qwen-code/qwen-code@0.24.4 ;;
    *) echo "$part: no such client" >&2; exit 2 ;;
  esac
done; done
