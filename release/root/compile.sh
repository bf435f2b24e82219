#!/bin/sh
# Runs inside the root: compiles OpenSSL 3 and CPython 3.11 of Debian 12, with its security patches, against Debian 11's
# C library, and installs them below /usr/local, where the loader of the root looks for libraries without any setting.
#
# /sources holds the verified source packages. CPython is compiled without profile-guided and link-time optimisation: on
# two cores these take an hour, and the kernels are not Python.
set -eu
export LC_ALL=C.UTF-8 TZ=UTC MAKEFLAGS="-j${JOBS:-$(nproc)}"

# unpack NAME: go to the patched source tree of the package; dates are those of its changelog, flags those of Debian.
unpack() {
  mkdir -p /compile "/usr/local/share/doc/$1"
  dpkg-source --no-check -x /sources/"$1"_*.dsc "/compile/$1"
  cd "/compile/$1"
  cp debian/copyright "/usr/local/share/doc/$1/copyright"
  SOURCE_DATE_EPOCH=$(dpkg-parsechangelog -S Timestamp)
  CFLAGS="$(dpkg-buildflags --get CFLAGS) -g0"
  CPPFLAGS=$(dpkg-buildflags --get CPPFLAGS)
  LDFLAGS=$(dpkg-buildflags --get LDFLAGS)
  export SOURCE_DATE_EPOCH CFLAGS CPPFLAGS LDFLAGS
}

unpack openssl
# Configuration and certificates are looked for where Debian has them.
./Configure linux-"$(uname -m)" shared no-tests no-legacy \
  --prefix=/usr/local --libdir=lib --openssldir=/usr/lib/ssl >/compile/openssl.log
# The shared libraries alone: the default target compiles each file a second time for the static ones, and renders manuals.
{ make build_generated && make libcrypto.so libssl.so; } >>/compile/openssl.log 2>&1 ||
  { tail -n 40 /compile/openssl.log; exit 1; }
mkdir -p /usr/local/include/openssl
cp include/openssl/*.h /usr/local/include/openssl
cp -P libcrypto.so* libssl.so* /usr/local/lib
ldconfig

unpack python3.11
# A built-in module, as in Debian: a security patch of it needs the interpreter's own headers.
echo 'pyexpat pyexpat.c expat/xmlparse.c expat/xmlrole.c expat/xmltok.c -I$(srcdir)/Modules/expat' \
  '-DHAVE_EXPAT_CONFIG_H -DXML_POOR_ENTROPY' >Modules/Setup.local
./configure --prefix=/usr/local --enable-shared --without-ensurepip --disable-test-modules --without-static-libpython \
  --with-openssl=/usr/local >/compile/python.log 2>&1 || { tail -n 40 /compile/python.log; exit 1; }
make >>/compile/python.log 2>&1 || { tail -n 40 /compile/python.log; exit 1; }
make -j1 install >>/compile/python.log 2>&1 || { tail -n 40 /compile/python.log; exit 1; }
ldconfig
# The folder that it was compiled in is nobody's business.
find /usr/local/lib/python3.11 -name '_sysconfigdata*.py' -o -name Makefile | xargs sed -i 's|/compile/|/usr/local/src/|g'
python3.11 -c 'import _ctypes, _elementtree, _uuid, bz2, hashlib, lzma, mmap, pyexpat, ssl, zlib; assert ssl.OPENSSL_VERSION_INFO >= (3,)'
packages=$(python3.11 -c 'import site; print(site.getsitepackages()[0])')
mkdir -p "$packages"
python3.11 -m zipfile -e /sources/pip-*.whl "$packages"
python3.11 -m pip --version
rm -rf /compile
