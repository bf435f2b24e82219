#!/bin/sh
# Tries a finished release as a new user would: trial.sh RELEASE_FOLDER ROOT MODEL.gguf [BACK_END, default cpu]
#
# Only what index.html links is taken, and what is typed are its lines. ROOT is a minimal system without Python
# (debootstrap --variant=minbase bookworm ROOT); run it as root, in the checkout. Nothing is reached but loopback; the
# user is nobody in particular, the path has spaces and an umlaut, /tmp is mounted noexec, and at the end the unpacked
# tree is read-only. The signature is checked by this machine's Python and OpenSSL, which ROOT has not. The exit status
# is 0 only if everything works.
set -eu
if [ "${5-}" != inside ]; then
  exec unshare --net --mount --pid --fork sh "$0" "$1" "$2" "$3" "${4:-cpu}" inside
fi
release=$1 root=$2 model=$3 back_end=$4
place='home/user/größe mit leerzeichen'
page="$root/$place/index.html"
rm -rf "${root:?}/$place"
mkdir -p "$root/$place" "$root/models"
cp "$release/index.html" "$page"
cp "$model" "$root/models/model.gguf"
mount -t proc proc "$root/proc"
mount -t devpts -o ptmxmode=666 devpts "$root/dev/pts"
mount -t tmpfs -o noexec,size=64m,mode=1777 tmpfs "$root/tmp"
ip link set lo up 2>/dev/null || python3 -c 'from release.smoke import raise_loopback; raise_loopback()'

# What the page says to type: the text of <pre id="$1">.
step() {
  sed -n "/<pre id=\"$1\">/,\$p" "$page" | sed '/<\/pre>/q' | sed 's/<pre id="[^"]*">//; s/<\/pre>//'
}
as_user() {
  chroot --userspec=12345:12345 "$root" env -i PATH=/usr/bin:/bin LANG=C.UTF-8 HOME=/home/user \
    ARCHIVE="$archive" MODEL=/models/model.gguf sh -eu -c "cd '/$place'; $1"
}
unpacked() {
  as_user "cd \"\${ARCHIVE%.tar.gz}\"; $1"
}

for name in check check-signature unpack chat serve ask; do
  grep -q "<pre id=\"$name\">" "$page" || { echo "trial: index.html does not say how to $name" >&2; exit 1; }
done
archive=$(sed -n "s/.*<a href=\"\([^\"]*-$(uname -m)-glibc-$back_end\.tar\.gz\)\".*/\1/p" "$page")
[ -n "$archive" ] || { echo "trial: index.html links no archive for this machine" >&2; exit 1; }
for name in $(grep -e "href=\"$archive\"" -e '^<li><a href=' "$page" | grep -o 'href="[^"]*"' | cut -d'"' -f2); do
  cp "$release/$name" "$root/$place/"
done
chown -R 12345:12345 "$root/home/user"
as_user '! command -v python3'
as_user "$(step check)"
grep -qF "<code>$(cd "$root/$place" && sha256sum "$archive" | cut -d' ' -f1)</code>" "$page"
(cd "$root/$place" && env -i PATH=/usr/bin:/bin ARCHIVE="$archive" sh -euc "$(step check-signature)")
as_user "$(step unpack)"
unpacked "echo 'Say hello.' | $(step chat)"
unpacked "echo 'Say hello.' | script -qec '$(step chat)' /dev/null" # on a terminal, where it reads otherwise
unpacked "$(step serve) 2>\"\$HOME/log\" & server=\$!
  for i in \$(seq 300); do sleep 0.2; grep -q Serving \"\$HOME/log\" && break; done
  $(step ask)
  kill -TERM \$server; wait \$server"
mount --bind "$root/$place" "$root/$place"
mount -o remount,ro,bind "$root/$place"
unpacked '! touch x'
unpacked "echo 'Say hello.' | $(step chat)"
echo "trial: everything worked"
