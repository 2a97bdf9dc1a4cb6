#!/usr/bin/env bash
# ansible-test sanity on the built artifact, in a folder of the layout that it asks for.
set -euo pipefail
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
ansible-galaxy collection build --force --output-path "$work" >/dev/null
target=$work/ansible_collections/gpufleet/sglang
mkdir -p "$target"
tar xzf "$work"/gpufleet-sglang-*.tar.gz -C "$target"
mkdir -p "$target/tests" && cp -r tests/sanity "$target/tests/" && rm "$target/tests/sanity/run.sh"
# Where only a package index is reachable, ansible-test cannot fetch get-pip.py: ensurepip does its work.
mkdir -p ~/.ansible/test/cache
for version in 20_3_4 21_3_1 24_2 25_2; do
  [ -e ~/.ansible/test/cache/get_pip_$version.py ] || cp tests/sanity/get_pip.txt ~/.ansible/test/cache/get_pip_$version.py
done
cd "$target"
ansible-test sanity --local --python "$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')" "$@"
