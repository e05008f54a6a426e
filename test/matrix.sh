#!/bin/sh
# One set of bits: builds the program in every cell (compiler, flags, processor, byte order, system), lets each compute the hashes
# listed in test/hashes.txt, and compares them with the digits committed there.
#
#   sh test/matrix.sh              every cell
#   sh test/matrix.sh quick        those that take about ten minutes on two cores
#   sh test/matrix.sh CELL...      these
#   sh test/matrix.sh list         the names of the cells
#   sh test/matrix.sh --update     writes test/hashes.txt anew, from the scalar backend of gcc -O0 and from nothing else
#
# A cell whose compiler or emulator is missing is "not run", which is not "passed" (test/matrix-install.sh installs what it can).
# The cells fault-* are builds made wrong on purpose and pass when they are caught: a comparison that nothing fails proves nothing.
# JOBS (2) cells run at once; what each said lies in build/matrix/CELL. The last line is "matrix: N passed, N failed, N skipped".
#
# Reading order: the cells, what a cell does, and at the end the command line.

cd "$(dirname "$0")/.." || exit 2
list=test/hashes.txt
out=build/matrix
export LC_ALL=C
unset GEMMA4_BACKEND GEMMA4_THREADS

# ---- The cells ---------------------------------------------------------------------------------------------------------------

quick_cells='gcc-O0 gcc-O1 gcc-O2 gcc-O3-native gcc-contract clang-O1 clang-O3-native musl x86-64-sse2 x86-64-avx2 i686 aarch64 s390x mingw wasm
    fault-contract fault-flush fault-x87'

all_cells() {
    for compiler in gcc clang; do
        for level in O0 O1 O2 O3 Os; do echo $compiler-$level $compiler-$level-native; done
        echo $compiler-lto $compiler-openmp $compiler-contract
    done
    echo tcc musl x86-64-sse2 x86-64-avx2 i686 i686-clang aarch64 aarch64-clang armv7 armv7-vfpv4 riscv64 riscv64-v ppc64le s390x s390x-z14 s390x-clang mingw wasm wasm-simd
    echo fault-contract fault-contract-clang fault-flush fault-x87
}

# Sets what a cell is made of: the compiler and its flags, the prefix that runs a program on this machine, the machine's name.
# Cross builds are static: an emulator then needs no foreign file system.
describe() {
    standard='-std=gnu11 -ffp-contract=off -Wall -Wextra -Werror -Wno-unknown-pragmas'
    flags=-O2 libs=-lm run= exe=gemma4 machine="$(uname -m)" backends='scalar cpu' tests=quants
    # quantised weights are tested everywhere; where integers, byte order or the system's files differ, the readers too
    case $1 in i686 | mingw) tests='quants json checkpoint gguf tokenizer' ;; s390x) tests='quants json gguf' ;; esac
    native=$(case $1 in *-native | *-contract) echo -march=native ;; esac)
    case $1 in
    gcc-* | clang-*)
        cc=${1%%-*}
        case $1 in
        *-O*) level=${1#*-} flags="-${level%-native} $native" ;;
        gcc-lto) flags='-O2 -flto' ;;
        clang-lto) flags='-O2 -flto' libs='-fuse-ld=lld -lm' ;;
        *-openmp) flags='-O3 -fopenmp' && export GEMMA4_THREADS=3 ;;
        # what each compiler does when nothing is said, which the sources are to overrule
        gcc-contract) flags="-O3 $native -ffp-contract=fast" ;;
        clang-contract) flags="-O3 $native -ffp-contract=on" ;;
        esac ;;
    # the backends choose their instructions at run time: processors without the newest
    x86-64-*)
        cc=gcc flags='-O2 -static' run="qemu-x86_64-static -cpu $(case $1 in *-sse2) echo qemu64 ;; *) echo max ;; esac)"
        machine="$1 (qemu)" ;;
    tcc) cc=tcc flags= standard='-std=c11 -Wall -Werror' ;;
    musl) cc=musl-gcc flags='-O2 -static' ;;
    # without SSE it would compute in the 80-bit registers of the x87
    i686) cc=i686-linux-gnu-gcc flags='-O2 -msse2 -mfpmath=sse -static' machine='i686 (SSE2)' ;;
    i686-clang) cc='clang --target=i686-linux-gnu' flags='-O3 -msse2 -mfpmath=sse -static' machine='i686 (SSE2)' ;;
    aarch64*) cross aarch64-linux-gnu aarch64 "$1" && flags='-O3 -static' ;;
    # floats by VFP only: NEON flushes subnormals
    armv7) cross arm-linux-gnueabihf arm "$1" && flags='-O2 -march=armv7-a+fp -mfpu=vfpv3-d16 -mfloat-abi=hard -static' machine="$machine, VFPv3-D16" ;;
    armv7-vfpv4) cross arm-linux-gnueabihf arm armv7 && flags='-O3 -march=armv7-a+neon-vfpv4 -mfloat-abi=hard -static' machine="$machine, VFPv4 NEON" ;;
    riscv64) cross riscv64-linux-gnu riscv64 "$1" && flags='-O3 -static' ;;
    # Vectors of 128 bits, in clang 14 an experiment. It is not to find more than the sources have: it would use vfncvt.rtz.x.f.w, on which QEMU 7.2 aborts.
    riscv64-v)
        cross riscv64-linux-gnu riscv64 riscv64-clang && machine='riscv64 V (qemu)' run="$run -cpu rv64,v=true,vext_spec=v1.0,vlen=128"
        flags='-O2 -fno-vectorize -fno-slp-vectorize -march=rv64gcv1p0 -mabi=lp64d -menable-experimental-extensions -mllvm -riscv-v-vector-bits-min=128 -static' ;;
    ppc64le) cross powerpc64le-linux-gnu ppc64le "$1" && flags='-O3 -static' ;;
    s390x-z14) cross s390x-linux-gnu s390x s390x && flags='-O3 -march=z14 -static' machine="$machine, z14" ;;
    s390x*) cross s390x-linux-gnu s390x "$1" && flags='-O2 -static' ;;
    mingw)
        cc=x86_64-w64-mingw32-gcc flags='-O2 -static' exe=gemma4.exe run=$(first_command wine64 /usr/lib/wine/wine64 wine) machine='x86-64 Windows (wine)'
        export WINEPREFIX="$PWD/$out/wine" WINEDEBUG=-all ;;
    # The module is compiled while node waits: emscripten 3.1.6 would else fetch it, which node refuses. NODE_PATH: where Debian keeps the
    # parser that emscripten needs, for a node that is not Debian's.
    wasm*)
        export NODE_PATH="${NODE_PATH:-/usr/share/nodejs}"
        cc=emcc libs='-sNODERAWFS=1 -sALLOW_MEMORY_GROWTH=1 -sEXIT_RUNTIME=1 -sWASM_ASYNC_COMPILATION=0' exe=gemma4.js run=node
        machine="wasm32 (node $(node --version 2>&1))"
        if [ "$1" = wasm-simd ]; then flags='-O3 -msimd128'; fi ;;
    # Wrong on purpose: contraction (gcc has to lose its pragma for that, clang with this flag ignores its own); a program linked as
    # -ffast-math links it, with start-up code that makes the processor flush subnormals; the 80-bit registers of the x87.
    fault-contract) cc=gcc flags='-O2 -march=native -ffp-contract=fast -w' backends=scalar ;;
    fault-contract-clang) cc=clang flags='-O2 -march=native -ffp-contract=fast -w' backends=scalar ;;
    fault-flush) cc=gcc flags='-O2 -w' libs='-ffast-math -lm' backends=scalar ;;
    fault-x87) cc=i686-linux-gnu-gcc flags='-O2 -march=i686 -static' machine='i686 (x87)' ;;
    *) return 1 ;;
    esac
}

# triplet, emulator, cell
cross() {
    case $3 in *-clang) cc="clang --target=$1" ;; *) cc=$1-gcc ;; esac
    run=qemu-$2-static machine="${3%-clang} (qemu)"
}

first_command() {
    for name; do command -v "$name" && return; done
    echo "$1"
}

# ---- What a cell does ----------------------------------------------------------------------------------------------------------

# The ids of a prompt of T tokens, of a vocabulary of V.
ids() { awk -v T="$1" -v V="$2" 'BEGIN { for (i = 0; i < T; i++) printf "%s%d", i ? "," : "", (i * 37 + 11) % V }'; }

# A model on which everything hangs on subnormal numbers: a fixture whose last norm has the weight 1e-40, and so have its logits.
make_subnormal() {
    rm -rf "$out/subnormal" && mkdir -p "$out/subnormal" && cp test/fixtures/untied-f32/* "$out/subnormal/" || return 1
    file=$out/subnormal/model.safetensors
    header=$(od -An -tu1 -N4 "$file" | awk '{ print $1 + 256 * ($2 + 256 * ($3 + 256 * $4)) }')
    range=$(dd if="$file" bs=1 skip=8 count="$header" 2>/dev/null | sed -n 's/.*"model\.norm\.weight":{[^}]*"data_offsets":\[\([0-9]*\),\([0-9]*\)\].*/\1 \2/p')
    awk -v n="$(((${range#* } - ${range% *}) / 4))" 'BEGIN { for (i = 0; i < n; i++) printf "x" }' | sed 's/x/\\303\\026\\001\\000/g' > "$out/subnormal/bytes" &&
        printf "$(cat "$out/subnormal/bytes")" | dd of="$file" bs=1 seek=$((8 + header + ${range% *})) conv=notrunc 2>/dev/null
}

# Runs the list with a program and a backend: "line N (...): expected, found" for each difference on stdout.
compare() {
    number=0
    while read -r digits model T V options; do
        number=$((number + 1))
        case $digits in '#'* | '' | -) continue ;; esac
        found=$($limit $run "$1" hash "$model" --ids "$(ids "$T" "$V")" $options --backend "$2" -q < /dev/null 2> "$dir/stderr") ||
            found="$found status $? $(head -n 1 "$dir/stderr")"
        echo "$2 $found $model $T $V $options" >> "$dir/log"
        [ "$found" = "$digits" ] || echo "line $number ($model $options, $2): expected $digits, found $found"
    done < "$list"
}

# Prints the line of one cell and leaves the word passed, failed or skipped in its folder.
one() {
    cell=$1 dir=$out/$1 start=$(date +%s) limit=
    describe "$cell" && mkdir -p "$dir" || return 2
    command -v timeout > /dev/null && limit='timeout 3600'
    version=$(${cc%% *} --version 2>/dev/null | head -n 1 | sed 's/([^)]*) *//; s/(.*//; s/GNU ld$//')
    [ "$cc" != tcc ] || version=$(tcc -v 2>&1)
    word=failed text=

    # Can a program of this kind be had and run here at all? One without a line of ours says so.
    # The product of two floats as a double: QEMU 7.2 computes s390x's instruction for it, which clang uses, from the wrong halves of its registers.
    printf '#include <math.h>\nint main(int n, char **a) { float f = 1.5f * n; double d = (double)f * f; return a && sqrt(16.0 * n) == 4 ? d == 2.25 ? 0 : 3 : 1; }\n' > "$dir/trivial.c"
    if ! command -v "${cc%% *}" > /dev/null; then
        word=skipped text="not run: ${cc%% *} is not installed"
    elif [ -n "$run" ] && ! command -v "${run%% *}" > /dev/null; then
        word=skipped text="not run: ${run%% *} is not installed"
    elif ! $cc $flags "$dir/trivial.c" -o "$dir/trivial-$exe" $libs > "$dir/trivial" 2>&1; then
        word=skipped text="not run: $cc cannot build a program of one line: $(grep -m 1 . "$dir/trivial")"
    elif ! $limit $run "$dir/trivial-$exe" > "$dir/trivial" 2>&1; then
        $limit $run "$dir/trivial-$exe" > "$dir/trivial" 2>&1
        case $? in 3) echo "1.5 * 1.5 is not 2.25 in ${run:-this system}" > "$dir/trivial" ;; esac
        word=skipped text="not run: a program of one line does not run here: $(grep -m 1 . "$dir/trivial")"
    else
        case $cell in fault-*) fault ;; *) same ;; esac
    fi
    echo $word > "$dir/word"
    printf '%-20s %-34.34s %-26s %5d s  %s\n' "$cell" "$version" "$machine" $(($(date +%s) - start)) "$text"
    [ "$word" != failed ]
}

# Builds sources ($1: the folder they lie in) to a program; says what is wrong on failure.
build() {
    objects=
    for source in $SOURCES; do
        objects="$objects $2-${source%.c}.o"
        $cc $standard $flags -I"$1" -c "$1/$source" -o "$2-${source%.c}.o" || break
    done > "$dir/build" 2>&1
    $cc $flags $objects -o "$2" $libs >> "$dir/build" 2>&1 && return
    text="FAILED to build: $(grep -m 1 -E 'error|warning|undefined' "$dir/build" || head -n 1 "$dir/build") ($dir/build)"
    return 1
}

# An ordinary cell: every line of the list, with every exact backend of the build that can run here.
same() {
    build . "$dir/$exe" || return
    can=$($limit $run "$dir/$exe" hash --ids 0 --backend list < /dev/null 2> "$dir/stderr" | sed -n 's/^\([a-z]*\) *can run here$/\1/p')
    ran=
    for backend in $backends; do
        echo "$can" | grep -qx "$backend" || continue
        ran="$ran $backend"
        compare "$dir/$exe" "$backend" >> "$dir/different"
    done
    case $ran in *scalar*) ;; *) text="FAILED: no backend scalar: $(head -n 1 "$dir/stderr")" && return ;; esac
    for test in $tests; do
        $cc $standard $flags -I. "test/test_$test.c" $(for source in $CORE tracefile; do echo "$dir/$exe-$source.o"; done) -o "$dir/test_$test-$exe" $libs > "$dir/build" 2>&1 ||
            { text="FAILED to build test_$test: $(grep -m 1 error "$dir/build") ($dir/build)" && return; }
        $limit $run "$dir/test_$test-$exe" "$dir/$exe" < /dev/null > "$dir/test_$test.log" 2>&1 ||
            { text="FAILED test_$test: $(grep -m 1 FAILED "$dir/test_$test.log" || tail -n 1 "$dir/test_$test.log")" && return; }
    done
    n=$(grep -c . "$dir/log") different=$(grep -c . "$dir/different")
    if [ "$n" -eq 0 ]; then
        text='FAILED: nothing was compared'
    elif [ "$different" -gt 0 ]; then
        text="DIFFERENT in $different of $n: $(head -n 1 "$dir/different")"
    else
        word=passed text="same ($n:$ran)${tests:+, tests: $tests}"
    fi
}

# A build made wrong. It passes if the compiler or the program refuses, naming the cause; and if, with its self-check cut out, the digits differ.
fault() {
    if [ "$cell" = fault-x87 ]; then
        if build . "$dir/$exe"; then text='FAILED: it was built all the same' && return; fi
        text="FAILED: does not name the cause: $text"
        if grep -q 'mfpmath=sse' "$dir/build"; then word=passed text='caught: refused by the compiler'; fi
        return
    fi
    mkdir -p "$dir/with" "$dir/without"
    cp ./*.[ch] "$dir/with/"
    [ $cell != fault-contract ] || sed 's/^#pragma GCC optimize.*//' gemma4.h > "$dir/with/gemma4.h"
    cp "$dir"/with/* "$dir/without/"
    case $cell in
    fault-flush) cause=subnormal check='static const char \*float_mode_fault(' ;;
    *) cause=-ffp-contract=off check='static int check_compiler(' ;;
    esac
    sed "s/^$check.*{\$/& return 0;/" gemma4.c > "$dir/without/gemma4.c"
    if cmp -s gemma4.c "$dir/without/gemma4.c" || { [ $cell = fault-contract ] && cmp -s gemma4.h "$dir/with/gemma4.h"; }; then
        text='FAILED: the guard to be cut out was not found in the sources'
        return
    fi
    build "$dir/with" "$dir/refusing" && build "$dir/without" "$dir/wrong" || return
    if "$dir/refusing" hash test/fixtures/e2b --ids 1 --backend scalar -q > "$dir/stdout" 2> "$dir/stderr" || ! grep -q -e "$cause" "$dir/stderr"; then
        text="FAILED: it computes all the same, or does not name the cause: $(cat "$dir/stdout") $(head -n 1 "$dir/stderr")"
        return
    fi
    compare "$dir/wrong" scalar > "$dir/different"
    n=$(grep -c . "$dir/log") different=$(grep -c ', found [0-9a-f]*$' "$dir/different")
    text="FAILED: refused, but without the self-check all of $n are the same; $(head -n 1 "$dir/different")"
    if [ "$different" -gt 0 ]; then word=passed text="caught: refused; without the self-check $different of $n differ, $(head -n 1 "$dir/different")"; fi
}

# Writes the digits into the list, comments and order kept.
update() {
    cell=gcc-O0 dir=$out/update limit=
    describe gcc-O0 && rm -rf "$dir" && mkdir -p "$dir" || return 2
    build . "$dir/$exe" || { echo "matrix: $text" >&2; return 2; }
    while IFS= read -r line; do
        case $line in '#'* | '') printf '%s\n' "$line" && continue ;; esac
        set -f && set -- $line && set +f
        model=$2 T=$3 V=$4
        shift 4
        if [ -e "$model" ]; then
            digits=$("$dir/$exe" hash "$model" --ids "$(ids "$T" "$V")" "$@" --backend scalar -q < /dev/null) || return 2
        else
            echo "matrix: $model is not there: its line stays without digits" >&2
            digits=-
        fi
        printf '%-16s %-32s %4d %5d  %s\n' "$digits" "$model" "$T" "$V" "$*"
    done < "$list" > "$dir/hashes" && cp "$dir/hashes" "$list"
}

# ---- The command line --------------------------------------------------------------------------------------------------------------

if [ "$1" = --one ]; then
    one "$2"
    exit
fi

# The Makefile knows which files the program is made of.
SOURCES=$(printf 'include Makefile\nmatrix-sources:\n\t@echo $(CORE:%%=%%.c) $(CLI:%%=%%.c)\n' | make -s -f - SERVER=0 matrix-sources) || exit 2
CORE=$(printf 'include Makefile\nmatrix-core:\n\t@echo $(CORE)\n' | make -s -f - SERVER=0 matrix-core) || exit 2
export SOURCES CORE
mkdir -p "$out" || exit 2
make_subnormal || { echo 'matrix: cannot make the subnormal model from test/fixtures/untied-f32' >&2; exit 2; }

case $1 in
list) all_cells | tr ' ' '\n' && exit ;;
--update) update && exit ;;
'') set -- $(all_cells) ;;
quick) set -- $quick_cells ;;
esac

for cell; do
    all_cells | tr ' ' '\n' | grep -qx -e "$cell" || { echo "matrix: there is no cell \"$cell\"; sh test/matrix.sh list" >&2; exit 2; }
done
failed=0 passed=0 skipped=0
for model in test/fixtures/*/config.json test/gguf/*.expected.safetensors; do
    case $model in */config.json) model=${model%/config.json} ;; *) model=${model%.expected.safetensors}.gguf ;; esac
    grep -q " $model " "$list" && continue
    echo "FAILED: $model is not in $list: add its lines, and its digits by --update"
    failed=$((failed + 1))
done
lines=$(grep -v '^#' "$list" | grep '^- ') && { echo 'skipped, for want of digits (--update):' && echo "$lines"; } && skipped=$(echo "$lines" | grep -c .)

for cell; do rm -rf "${out:?}/$cell"; done
printf '%s\n' "$@" | nice xargs -n 1 -P "${JOBS:-2}" sh test/matrix.sh --one
for cell; do
    case $(cat "$out/$cell/word" 2>/dev/null) in
    passed) passed=$((passed + 1)) ;;
    skipped) skipped=$((skipped + 1)) ;;
    *) failed=$((failed + 1)) ;;
    esac
done
echo "matrix: $passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
