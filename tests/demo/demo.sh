#!/usr/bin/env bash
# Show the collection at work. Needs root on an x86-64 Debian machine for the three sandbox hosts; elsewhere it only looks.
set -euo pipefail
cd "$(dirname "$0")/../.."
say() { printf '\n==> %s\n' "$*"; }

if [ "$(id -u)" != 0 ] || [ "$(uname -sm)" != "Linux x86_64" ] || ! command -v apt-get >/dev/null; then
  say "The sandbox hosts need root on an x86-64 Debian machine: showing the read-only part, probe and plan, on localhost"
  exec ansible-playbook -i tests/demo/localhost.yml gpufleet.sglang.probe "$@"
fi

interrupted() {
  trap - INT TERM
  say "Interrupted: removing the sandbox hosts; the caches stay for the next run"
  python3 tests/hosts/hosts.py down --prefix demo
  exit 130
}
trap interrupted INT TERM

started=$SECONDS
say "Sandbox hosts: packages, image, and a real SGLang on the CPU (3.4 GB, built once into the cache)"
python3 tests/hosts/hosts.py setup
python3 tests/sglang_cpu/build_env.py sglang gpu-b gpu-c
python3 tests/hosts/hosts.py up --prefix demo --subnet 10.90.7.0/24 \
  gpu-a:ops:models:ip=11:env=sglang gpu-b:ip=12:env=gpu-b gpu-c:ip=13:env=gpu-c

say "First run: site.yml on three hosts with three faults"
ansible-playbook -i inventories/sandbox/hosts.yml site.yml "$@"

say "Second run: nothing to change"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
ansible-playbook -i inventories/sandbox/hosts.yml site.yml "$@" | tee "$log"
if grep -E 'changed=[1-9]' "$log"; then
  say "The second run changed something: that is a fault of ours"
  exit 1
fi
say "Done in $((SECONDS - started)) s. The hosts stay up: try  ssh -F <(python3 tests/hosts/hosts.py ssh-config --prefix demo) gpu-a;  make clean removes them"
