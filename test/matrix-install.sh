#!/bin/sh
# Installs what the cells of test/matrix.sh need and this machine lacks: Debian's compilers, emulators and Wine, about 3 GB. Root, or sudo.
# gcc-multilib conflicts with the cross compilers, so 32-bit x86 is a cross compiler too. Elsewhere than on Debian and Ubuntu: by hand.
command -v apt-get > /dev/null || { echo 'matrix-install: apt-get is not here; install the compilers that `sh test/matrix.sh` reports as missing' >&2; exit 2; }

packages='gcc libc6-dev make clang lld libomp-dev tcc musl-tools
    gcc-i686-linux-gnu libc6-dev-i386-cross gcc-aarch64-linux-gnu libc6-dev-arm64-cross gcc-arm-linux-gnueabihf libc6-dev-armhf-cross
    gcc-riscv64-linux-gnu libc6-dev-riscv64-cross gcc-powerpc64le-linux-gnu libc6-dev-ppc64el-cross gcc-s390x-linux-gnu libc6-dev-s390x-cross
    qemu-user-static gcc-mingw-w64-x86-64-posix wine64 emscripten'
command -v node > /dev/null || packages="$packages nodejs"

missing=
for package in $packages; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
done
[ -n "$missing" ] || exit 0
echo "matrix-install: installing$missing"
as_root=
[ "$(id -u)" -eq 0 ] || as_root=sudo
$as_root apt-get update -q && $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $missing
