#!/bin/sh
# Requests to a running server with curl. Start it first: outrider serve
set -eu
url=${1:-http://127.0.0.1:8000}

curl -s "$url/v1/models"
echo
curl -s "$url/v1/chat/completions" -H 'content-type: application/json' -d '{
  "messages": [{"role": "user", "content": "Name three rivers."}], "temperature": 0, "max_tokens": 32
}'
echo
curl -sN "$url/v1/chat/completions" -H 'content-type: application/json' -d '{
  "messages": [{"role": "user", "content": "Name three rivers."}], "temperature": 0, "max_tokens": 32,
  "stream": true, "stream_options": {"include_usage": true}, "speculation": {"k": 4}
}'
curl -s "$url/metrics" | grep '^outrider:spec_decode_num'
