#!/bin/sh
# long.sh - what takes minutes: `make long`. 100,000 tokens through the shipped model with the window crossed hundreds of times, a context of 131072, memory that
# stays flat, a stack of 256 KiB, valgrind, a full disk, a reader that goes away. Last line: long: N passed, N failed, N skipped.
set -u
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
head -c "${1:-190000}" "$dir/all" > "$dir/text"
n=$($G tokenize -f "$dir/text" | wc -w)
echo "$n tokens"
[ "$n" -ge "${2:-100000}" ]; check "at least ${2:-100000} tokens ($n)" $?

a=$($G hash -q -f "$dir/text" --ctx 131072 --chunk 128)
b=$($G hash -q -f "$dir/text" --ctx 131072 --chunk 1 --threads 1)
c=$($G hash -q -f "$dir/text" --ctx 131072 --chunk 37)
[ -n "$a" ] && [ "$a" = "$b" ] && [ "$a" = "$c" ]; check "one hash in chunks of 128 ($a), 37 ($c) and token by token ($b)" $?
head -c 20000 "$dir/text" > "$dir/short"
a=$($G hash -q -f "$dir/short" --backend scalar)
b=$($G hash -q -f "$dir/short")
[ -n "$a" ] && [ "$a" = "$b" ]; check "scalar ($a) and the default backend ($b)" $?

if [ -x /usr/bin/time ]; then
    for chars in 20000 190000; do
        head -c $chars "$dir/all" > "$dir/part"
        /usr/bin/time -f %M "$G" hash -q -f "$dir/part" --ctx 131072 > /dev/null 2> "$dir/rss"
        eval "rss_$chars=$(tail -n 1 "$dir/rss")"
    done
    # what grows is the part of the caches that is touched: 2 tensors of float32, one full layer of the shipped model, 64 numbers
    allowed=$((rss_20000 + n * 2 * 64 * 4 / 1024 + 4096))
    [ "$rss_190000" -le "$allowed" ]; check "memory: $rss_20000 KB, then $rss_190000 KB, allowed $allowed KB" $?
else
    skipped=$((skipped + 1)); echo "skipped: memory: no /usr/bin/time"
fi

(ulimit -s 256 && $G hash -q -f "$dir/short" > /dev/null && $G run -q -p "It is" -n 20 --seed 1 > /dev/null)
check "a stack of 256 KiB" $?
yes 'word ' | tr -d '\n' | head -c 1000000 > "$dir/words"
head -c 1000000 /dev/zero | tr '\0' a > "$dir/letters"
(ulimit -s 256 && $G tokenize -f "$dir/words" > /dev/null && $G tokenize -f "$dir/letters" > /dev/null)
check "a megabyte of words and of one letter, tokenized with a stack of 256 KiB" $?

if [ -w /dev/full ]; then
    for command in "run -q -p It -n 5" "hash --ids 2,3" "logits --ids 2,3" "tokenize -p It" "info" "score -p It" "help"; do
        $G $command > /dev/full 2> "$dir/err"
        [ $? -eq 2 ] && [ "$(grep -c '^gemma4: ' "$dir/err")" -eq 1 ]; check "/dev/full: $command" $?
    done
else
    skipped=$((skipped + 1)); echo "skipped: no /dev/full"
fi
$G run -q -p It -n 400 --seed 1 2> "$dir/err" | head -c 1 > /dev/null
[ ! -s "$dir/err" ]; check "a reader that goes away is no news" $?

if command -v valgrind > /dev/null; then
    OMP_NUM_THREADS=1 valgrind -q --error-exitcode=9 --leak-check=full --show-leak-kinds=definite,possible "$G" run -q -p "It is a truth" -n 3 --seed 1 --backend scalar --threads 1 > /dev/null 2> "$dir/err"
    status=$?
    [ $status -eq 0 ] || cat "$dir/err"
    check "valgrind on a short run" $status
else
    skipped=$((skipped + 1)); echo "skipped: valgrind is not installed"
fi
echo "long: $passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
