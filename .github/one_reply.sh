#!/usr/bin/env bash
# Start the server on the demo model, ask it one question, and end it. Fails on a wrong answer.
set -euo pipefail
cd "$(dirname "$0")/.."

port="${1:-8080}"
python3.12 install_and_run.py --model demo --port "$port" --no-proxy &
server=$!
trap 'kill "$server" 2>/dev/null || true' EXIT

url="http://127.0.0.1:$port"
for _ in $(seq 120); do
  curl --silent --fail --output /dev/null "$url/health" && break
  kill -0 "$server" || exit 1
  sleep 1
done

reply="$(curl --silent --show-error --fail "$url/v1/chat/completions" \
  --header 'Content-Type: application/json' \
  --data '{"messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0}')"
echo "$reply"
grep --quiet --fixed-strings '17 + 25 = 42' <<<"$reply"

kill "$server"
wait "$server"
trap - EXIT
