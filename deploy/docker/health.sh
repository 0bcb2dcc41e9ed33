#!/usr/bin/env bash
# Healthcheck of a container: HTTP status 200 at AFD_HEALTH, as HOST:PORT/PATH. The default is the
# gateway, for `afd serve` and `afd gateway`. An empty AFD_HEALTH checks nothing.
set -euo pipefail
target=${AFD_HEALTH-127.0.0.1:8000/health}
[ -n "$target" ] || exit 0
address=${target%%/*}
exec 3<>"/dev/tcp/${address%:*}/${address##*:}"
[ "$target" = "$address" ] && exit 0 # a port that accepts connections is enough
printf 'GET /%s HTTP/1.0\r\nHost: %s\r\n\r\n' "${target#*/}" "$address" >&3
read -r _ code _ <&3
[ "$code" = 200 ]
