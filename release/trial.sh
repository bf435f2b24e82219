#!/bin/sh
# Tries a finished release as a new user would: trial.sh RELEASE_FOLDER ROOT MODEL.gguf
#
# ROOT is a minimal system without Python (debootstrap --variant=minbase bookworm ROOT); run it as root, in the checkout.
# Nothing is reached but loopback; the user is nobody in particular, the path has spaces and an umlaut, /tmp is mounted
# noexec, and at the end the unpacked tree is read-only. The exit status is 0 only if everything works.
set -eu
if [ "${4-}" != inside ]; then
  exec unshare --net --mount --pid --fork sh "$0" "$1" "$2" "$3" inside
fi
release=$1 root=$2 model=$3
place='home/user/größe mit leerzeichen'
mkdir -p "$root/media/stick" "$root/$place" "$root/models"
cp "$release"/* "$root/media/stick/"
cp "$model" "$root/models/model.gguf"
chown -R 12345:12345 "$root/home/user"
mount -t proc proc "$root/proc"
mount -t tmpfs -o noexec,size=64m,mode=1777 tmpfs "$root/tmp"
ip link set lo up 2>/dev/null || python3 -c 'from release.smoke import raise_loopback; raise_loopback()'

as_user() {
  chroot --userspec=12345:12345 "$root" env -i PATH=/usr/bin:/bin LANG=C.UTF-8 HOME=/home/user sh -eu -c "cd '/$place'; $1"
}

as_user '! command -v python3'
# The page alone says what to take, and its digest.
as_user 'cd /media/stick
  archive=$(sed -n "s/.*<a href=\"\([^\"]*-$(uname -m)-glibc-cpu[^\"]*\)\".*/\1/p" index.html)
  grep -qF "<code>$(sha256sum "$archive" | cut -d" " -f1)</code>" index.html
  sha256sum -c "$archive.sha256"
  cd - && tar xzf "/media/stick/$archive"'
as_user 'cd trivet-*; bin/trivet --version; bin/trivet verify-self'
as_user 'cd trivet-*; echo "Say hello." | bin/trivet chat --model /models/model.gguf --max-tokens 12 --temperature 0'
as_user 'cd trivet-*
  bin/trivet serve /models/model.gguf --port 8123 2>"$HOME/log" & server=$!
  for i in $(seq 300); do sleep 0.2; grep -q Serving "$HOME/log" && break; done
  bin/trivet complete --url http://127.0.0.1:8123/v1 --max-tokens 8 --temperature 0 "Water boils at"
  kill -TERM $server; wait $server'
mount --bind "$root/$place" "$root/$place"
mount -o remount,ro,bind "$root/$place"
as_user 'cd trivet-*; ! touch x; bin/trivet complete --model /models/model.gguf --max-tokens 8 --temperature 0 "Water boils at"'
echo "trial: everything worked"
