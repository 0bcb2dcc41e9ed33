#!/usr/bin/env bash
# A probe of a role whose port depends on its number: ready.sh PATH BASE-PORT PORTS-PER-POD
# For pods on the network of their node, where an httpGet probe cannot know the port.
set -euo pipefail
exec 3<>"/dev/tcp/$POD_IP/$(($2 + AFD_INDEX * $3))"
printf 'GET %s HTTP/1.0\r\nHost: %s\r\n\r\n' "$1" "$POD_IP" >&3
read -r _ code _ <&3
[ "$code" = 200 ]
