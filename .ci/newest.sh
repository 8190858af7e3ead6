#!/usr/bin/env bash
# The suite on the newest jax, which needs Python 3.12 or newer. What follows goes to pytest.
#
#   PYTHON=python3.13 .ci/newest.sh              with this Python, not python3
#   ROOT_FOLDER=../trixie .ci/newest.sh         with the Python 3.13 of Debian trixie, as root on an
#                                                older Debian; the first run makes the folder, which
#                                                takes 5 minutes and 2.3 GB
set -euo pipefail
cd "$(dirname "$0")/.."
here=${PYTHON:-python3}

if [ -z "${ROOT_FOLDER:-}" ]; then
  "$here" -c 'import sys; sys.exit(sys.version_info < (3, 12))' || {
    echo "Expected Python 3.12 or newer; got $("$here" --version). Set PYTHON or ROOT_FOLDER." >&2
    exit 2
  }
  exec .ci/run "$@"
fi

if [ ! -e "$ROOT_FOLDER/made" ]; then
  command -v debootstrap > /dev/null || { apt-get update && apt-get install -y debootstrap; }
  packages=python3,python3-venv,python3-dev,ca-certificates,git
  debootstrap --variant=minbase --include="$packages" trixie "$ROOT_FOLDER" ${MIRROR:-}
  touch "$ROOT_FOLDER/made"
fi
cp /etc/resolv.conf /etc/hosts "$ROOT_FOLDER/etc/"
cp /etc/ssl/certs/ca-certificates.crt "$ROOT_FOLDER/etc/ssl/certs/"
# Constraints and wheels of the older Python would hold back the newest jax.
[ ! -e /etc/pip.conf ] || grep -v constraint /etc/pip.conf > "$ROOT_FOLDER/etc/pip.conf" || true

mounted=()
leave() {
  for place in ${mounted[@]+"${mounted[@]}"}; do umount "$place"; done
}
trap leave EXIT
for place in dev proc sys; do
  mountpoint -q "$ROOT_FOLDER/$place" && continue # of another run
  case $place in
    dev) mount --bind /dev "$ROOT_FOLDER/dev" ;;
    *) mount -t "${place/sys/sysfs}" "$place" "$ROOT_FOLDER/$place" ;;
  esac
  mounted+=("$ROOT_FOLDER/$place")
done

copy=$(mktemp -d "$ROOT_FOLDER/opt/gainstage.XXXXXX") # a copy: the host's builds stay as they are
trap 'leave; rm -rf "$copy"' EXIT
git ls-files -z --cached --others --exclude-standard | tar --create --null --files-from=- |
  tar --extract --directory="$copy"
env -u PIP_FIND_LINKS -u PYTHONPATH -u VIRTUAL_ENV PYTHON=python3 \
  chroot "$ROOT_FOLDER" "/opt/$(basename "$copy")/.ci/run" "$@"
