#!/bin/sh
# fuzz.sh [EXECUTIONS | short] [TARGET...] - the parsers under libFuzzer (test/fuzz.c), in turns of a minute, until all targets together have had
# that many executions: `make fuzz`. It goes on where it was stopped; build/fuzz/TARGET holds the corpus, the count and the inputs that failed.
# `short`: one turn of 3 seconds each. A crash, a failed check, a sanitizer's report, a leak, a minute or 256 MB for one input: each is a
# failure, and ends its target.
set -u
B=build/fuzz
G=${GEMMA4:-./gemma4}
total=${1:-100000000}
[ $# -gt 0 ] && shift
passed=0 failed=0 skipped=0

flags='-fsanitize=address,undefined'
mkdir -p $B
echo 'int LLVMFuzzerTestOneInput(const unsigned char *d, unsigned long n); int LLVMFuzzerTestOneInput(const unsigned char *d, unsigned long n) { return !d && n; }' > $B/try.c
if ! clang $flags,fuzzer $B/try.c -o $B/try 2> /dev/null; then
    echo "skipped: fuzzing: clang with libFuzzer and the sanitizers is not installed"
    echo "fuzz: 0 passed, 0 failed, 1 skipped"
    exit 0
fi
make --no-print-directory CC=clang B=$B OPT="-O1 -g $flags,fuzzer-no-link -fno-sanitize-recover=all" ARCH= OPENMP=0 WERROR= LDFLAGS=-fsanitize=fuzzer $B/fuzz > $B/log 2>&1 || {
    cat $B/log
    echo "FAILED fuzz: does not build"
    echo "fuzz: 0 passed, 1 failed, 0 skipped"
    exit 1
}

# The first inputs are real files, or small parts of them.
seed() {
    mkdir -p "$B/$1/corpus"
    [ -e "$B/$1/seeded" ] && return
    to=$B/$1/corpus n=0
    case $1 in
    json | config)
        for file in models/austen/*.json test/fixtures/*/*.json; do
            n=$((n + 1))
            [ "$(wc -c < "$file")" -lt 3000 ] && cp "$file" "$to/$n"
        done ;;
    safetensors | diff)
        for names in ids norm 'ids,norm' 'layers.0.q,layers.0.router_index' 'nothing,logits,ids'; do
            for ids in 1 1,2; do
                n=$((n + 1))
                $G trace test/fixtures/26b-a4b -q --ids $ids --tensors "$names" -o $B/trace > $B/log || continue
                if [ "$1" = diff ]; then cat $B/trace; printf ====; fi > "$to/$n"
                cat $B/trace >> "$to/$n"
            done
        done ;;
    tokenizer) # the byte tokens as one byte (fuzz.c), and of the other entries and merges the first ones
        LC_ALL=C sed -E -e 's/("added_tokens":\[(\{[^}]*\},){2}\{[^}]*\})(,\{[^}]*\})*/\1/' -e 's/"<0x00>":24,.*"<0xFF>":279/\x01/' -e 's/,"([^"\\]|\\.)+":([4-9][0-9][0-9]|[12][0-9]{3})//g' \
            -e 's/("merges":\[(\["[^]]*\],){7}\["[^]]*\]).*/\1]}}/' models/austen/tokenizer.json > "$to/pairs"
        LC_ALL=C sed -E 's/\["([^"]+)","([^"]+)"\]/"\1 \2"/g' "$to/pairs" > "$to/strings" ;;
    gguf) cp test/gguf/tiny.gguf "$to/" ;;
    encode)
        for n in 1 2 3 4 5 6 7 8 9; do tail -c +${n}000 README.md | head -c 150 > "$to/$n"; done
        printf '0<bos><|turn>user\n\303\244\360\237\230\200 \342\226\201  hmm\n\n\n' > "$to/special" ;;
    decode)
        for n in 1 2 3 4 5 6 7 8 9; do tail -c +${n}00000 models/austen/model.safetensors | head -c 100 > "$to/$n"; done ;;
    chat) sed -n 's/^{"request": \(.*\), "small": .*/\1/p' test/chats.jsonl | while read -r line; do
            n=$((n + 1))
            [ ${#line} -gt 2000 ] || printf '%s' "$line" > "$to/$n"
        done ;;
    answer)
        printf '0<|channel>thought\nhm \303\244<channel|>It is.<turn|>' > "$to/1"
        printf '1still<channel|>yes<|tool_call>call:f{a:<|"|>x y<|"|>,b:[1,-2.5e3,true,null],c:{d:{}}}<tool_call|><|tool_response>' > "$to/2" ;;
    ids)
        printf 2,818,5279 > "$to/1"
        printf 0,2147483647,-1 > "$to/2" ;;
    esac
    : > "$B/$1/seeded"
}

# What the parsers compare with.
LC_ALL=C grep -oh '"[][A-Za-z0-9_.<>|]\{2,40\}"' checkpoint.c gguf.c tokenizer.c tracefile.c chat.c answer.c | sort -u > $B/dictionary

limits='-timeout=60 -rss_limit_mb=1024 -malloc_limit_mb=256'

# run TARGET LONGEST SECONDS: one turn; counts what it executed
run() {
    "$B/fuzz" --target="$1" -max_total_time="$3" -max_len="$2" -dict=$B/dictionary -artifact_prefix="$B/$1/failed-" $limits -print_final_stats=1 \
        -verbosity=0 "$B/$1/corpus" > "$B/$1/log" 2>&1
    status=$?
    # killed from outside, it leaves no input behind
    [ $status -eq 0 ] || [ -n "$stopped" ] || [ "$(failures "$1")" -gt 0 ] || echo "status $status" > "$B/$1/failed-died"
    n=$(sed -n 's/^stat::number_of_executed_units: *//p' "$B/$1/log")
    echo $(($(cat "$B/$1/executions" 2> /dev/null || echo 0) + ${n:-0})) > "$B/$1/executions"
}

# What failed once and does not any more goes into the corpus.
retry() {
    rm -f "$B/$1/failed-died"
    for input in "$B/$1"/failed-[!s]*; do
        [ -e "$input" ] && "$B/fuzz" --target="$1" $limits "$input" > "$B/$1/log" 2>&1 && mv "$input" "$B/$1/corpus/"
    done
}

executed() { cat "$B/$1/executions" 2> /dev/null || echo 0; }
failures() { ls "$B/$1/" | grep -c '^failed-[^s]'; } # failed-slow-unit: libFuzzer's notes

"$B/fuzz" --list > $B/list
[ $# -gt 0 ] && for name; do grep "^$name " $B/list; done > $B/chosen && mv $B/chosen $B/list
seconds=60
[ "$total" = short ] && seconds=3 total=0
while read -r name longest; do
    seed "$name"
    retry "$name"
done < $B/list
stopped=
trap 'trap - INT TERM; stopped=1' INT TERM
while :; do
    all=0 alive=0
    while read -r name longest; do
        if [ "$(failures "$name")" -eq 0 ] && [ -z "$stopped" ]; then
            alive=1
            run "$name" "$longest" $seconds
        fi
        all=$((all + $(executed "$name")))
    done < $B/list
    [ $all -lt "$total" ] && [ $alive -eq 1 ] && [ -z "$stopped" ] || break
done

while read -r name longest; do
    n=$(executed "$name") bad=$(failures "$name")
    printf '%-12s %11d executions, %5d inputs in the corpus, %d failed\n' "$name" "$n" "$(ls "$B/$name/corpus" | wc -l)" "$bad"
    if [ "$n" -eq 0 ] && [ -n "$stopped" ]; then
        skipped=$((skipped + 1))
        echo "skipped: $name: stopped before its turn"
    elif [ "$bad" -gt 0 ] || [ "$n" -eq 0 ]; then
        failed=$((failed + 1))
        grep -E -m 3 'ERROR|runtime error|not so' "$B/$name/log" || tail -n 20 "$B/$name/log"
        for input in "$B/$name"/failed-[!s]*; do echo "FAILED $name: $B/fuzz --target=$name $input"; done
    else
        passed=$((passed + 1))
    fi
done < $B/list
echo "$all executions in all"
echo "fuzz: $passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ] && [ $passed -gt 0 ]
