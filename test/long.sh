#!/bin/sh
# long.sh - what takes minutes: `make long`. 100,000 tokens through the shipped model with the window crossed hundreds of times, a context of 131072, memory that
# stays flat, a stack of 256 KiB, valgrind, a full disk, a reader that goes away. Last line: long: N passed, N failed, N skipped.
set -u
export OMP_WAIT_POLICY=passive # threads that spin while they wait take the processor from whatever else this machine does
passed=0 failed=0 skipped=0
G=./gemma4
dir=$(mktemp -d) || exit 2
trap 'rm -rf "$dir"' EXIT
check() { # what, condition's status
    if [ "$2" -eq 0 ]; then
        passed=$((passed + 1))
        echo "ok: $1"
    else
        failed=$((failed + 1))
        echo "FAILED $1"
    fi
}

# The sources of this project are long enough, and their tokens are short.
cat gemma4.c checkpoint.c tokenizer.c main.c backend_cpu.c gemma4.h test/test_checkpoint.c > "$dir/all"
head -c "${1:-155000}" "$dir/all" > "$dir/text"
n=$($G tokenize -f "$dir/text" | wc -w)
echo "$n tokens"
[ "$n" -ge "${2:-100000}" ]; check "at least ${2:-100000} tokens ($n)" $?

# timed COMMAND: the most memory that it had, in KB, goes into $dir/kb
time=/usr/bin/time
timed() {
    if [ -x $time ]; then $time -f %M -o "$dir/kb" "$@"; else "$@"; fi
}

head -c 20000 "$dir/text" > "$dir/short"
a=$(timed $G hash -q -f "$dir/text" --ctx 131072 --chunk 128)
[ -x $time ] && long_kb=$(tail -n 1 "$dir/kb")
b=$($G hash -q -f "$dir/text" --ctx 131072 --chunk 1 --threads 1)
c=$($G hash -q -f "$dir/text" --ctx 131072 --chunk 37)
[ -n "$a" ] && [ "$a" = "$b" ] && [ "$a" = "$c" ]; check "one hash in chunks of 128 ($a), 37 ($c) and token by token ($b)" $?
a=$($G hash -q -f "$dir/short" --backend scalar)
b=$(timed $G hash -q -f "$dir/short" --ctx 131072 --chunk 128)
[ -n "$a" ] && [ "$a" = "$b" ]; check "scalar ($a) and the default backend ($b)" $?

if [ -x $time ]; then
    short_kb=$(tail -n 1 "$dir/kb")
    # what grows is the part of the caches that is touched: 2 tensors of float32, one full layer of the shipped model, 64 numbers
    allowed=$((short_kb + n * 2 * 64 * 4 / 1024 + 4096))
    [ "$long_kb" -le "$allowed" ]; check "memory: $short_kb KB for 20000 bytes, $long_kb KB for all, allowed $allowed KB" $?
else
    skipped=$((skipped + 1)); echo "skipped: memory: no $time"
fi

(ulimit -s 256 && $G hash -q -f "$dir/short" > /dev/null && $G run -q -p "It is" -n 20 --seed 1 > /dev/null)
check "a stack of 256 KiB" $?
yes 'word ' | tr -d '\n' | head -c 1000000 > "$dir/words"
head -c 1000000 /dev/zero | tr '\0' a > "$dir/letters"
(ulimit -s 256 && $G tokenize -f "$dir/words" > /dev/null && $G tokenize -f "$dir/letters" > /dev/null)
check "a megabyte of words and of one letter, tokenized with a stack of 256 KiB" $?

if [ -w /dev/full ]; then
    for command in "run -q -p It -n 5" "hash --ids 2,3" "logits --ids 2,3" "trace --ids 2,3 -o $dir/trace" "diff $dir/trace $dir/trace" "tokenize -p It" "detokenize 300" \
        "info" "score -p It" "help"; do
        $G $command > /dev/full 2> "$dir/err"
        [ $? -eq 2 ] && [ "$(grep -c '^gemma4: ' "$dir/err")" -eq 1 ]; check "/dev/full: ${command%% *}" $?
    done
    for command in trace logits; do
        $G $command --ids 2,3 -o /dev/full > /dev/null 2> "$dir/err"
        [ $? -eq 2 ] && [ "$(grep -c '^gemma4: ' "$dir/err")" -eq 1 ]; check "-o /dev/full: $command" $?
    done
else
    skipped=$((skipped + 1)); echo "skipped: no /dev/full"
fi
{ $G run -q -p It -n 400 --ignore-eos --seed 1 2> "$dir/err"; echo $? > "$dir/status"; } | head -c 1 > /dev/null
[ ! -s "$dir/err" ] && [ "$(cat "$dir/status")" -eq 2 ]; check "a reader that goes away is no news, but the status tells" $?

# valgrind does not know the newest instructions of this processor, which a plain `make` uses
if ! command -v valgrind > /dev/null; then
    skipped=$((skipped + 1)); echo "skipped: valgrind is not installed"
elif ! make --no-print-directory B=build/plain OUT=build/plain/ ARCH= OPENMP=0 OPT='-O1 -g' build/plain/gemma4 > "$dir/err" 2>&1; then
    cat "$dir/err"
    check "a build for valgrind" 1
else
    for command in "run -p truth -n 3 --seed 1 --backend scalar" "run -p truth -n 3 --seed 1 --backend cpu" "hash test/fixtures/everything --ids 2,3,4 --chunk 2" \
        "trace --ids 2,3,4 -o $dir/trace" "diff $dir/trace $dir/trace" "detokenize 300"; do
        valgrind -q --error-exitcode=9 --leak-check=full --show-leak-kinds=definite,possible build/plain/gemma4 $command -q > /dev/null 2> "$dir/err"
        status=$?
        [ $status -eq 0 ] || cat "$dir/err"
        check "valgrind: ${command%% -*}" $status
    done
fi
echo "long: $passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
