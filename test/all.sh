#!/bin/sh
# all.sh - the slow tests, after `make test`: the same tests under sanitizers, then everything that is compared live with transformers and
# tokenizers. Installs reference/requirements.txt into build/venv. CC, PYTHON and SHARED come from the Makefile.
set -u
export OMP_WAIT_POLICY=passive
passed=0 failed=0 skipped=0
[ -n "${CI:-}" ] && seed=3 || seed=$$
log=build/all.log

# Adds the last line "[name: ]N passed, N failed, N skipped" of the log, or one failure if there is none or the status says so.
count() {
    line=$(tail -n 1 "$log" | sed -n 's/^\([a-z_0-9]*: \)\{0,1\}\([0-9]*\) passed, \([0-9]*\) failed, \([0-9]*\) skipped$/\2 \3 \4/p')
    grep -E '^(FAILED|skipped)' "$log"
    if [ -z "$line" ] || { [ "$1" -ne 0 ] && [ "$(echo "$line" | cut -d' ' -f2)" -eq 0 ]; }; then
        tail -n 30 "$log"
        echo "FAILED $2: status $1"
        failed=$((failed + 1))
    fi
    [ -z "$line" ] && return
    set -- $line "$2"
    echo "$4: $1 passed, $2 failed, $3 skipped"
    passed=$((passed + $1)) failed=$((failed + $2)) skipped=$((skipped + $3))
}

mkdir -p build/san
make --no-print-directory SAN=1 CC="$CC" B=build/san OUT=build/san/ SHARED="${SHARED:-none}" test > "$log" 2>&1
count $? sanitizers

if make --no-print-directory BLIS=1 CC="$CC" B=build/blis OUT=build/blis/ build/blis/gemma4 build/blis/test_blis > "$log" 2>&1; then
    build/blis/test_blis build/blis/gemma4 > "$log" 2>&1
    count $? blis
elif grep 'BLIS=1: ' "$log"; then
    echo "skipped: blis"
    skipped=$((skipped + 1))
else
    count 2 blis
fi

build/test_ulp ./gemma4 101 > "$log" 2>&1
count $? ulp

sh test/fuzz.sh short > "$log" 2>&1
count $? fuzz

if [ ! -x build/venv/bin/python ] || ! cmp -s reference/requirements.txt build/venv/requirements.txt; then
    "$PYTHON" -m venv build/venv && build/venv/bin/pip install --quiet -r reference/requirements.txt && cp reference/requirements.txt build/venv/
fi
# the engine's requests in random company, at length
build/test_engine ./gemma4 60 "$seed" > "$log" 2>&1
count $? engine

# a fresh seed each time; CI takes one, so that a red run there means a change
build/venv/bin/python test/live.py ${CI:+--seed 3} > "$log" 2>&1
count $? live

build/venv/bin/python -W ignore reference/sampling.py -o build/sampling.safetensors -n 10000 --vocab 1000 --seed "$seed" > "$log" 2>&1 &&
    build/test_sampler ./gemma4 build/sampling.safetensors > "$log" 2>&1
count $? sampling

build/venv/bin/python -W ignore test/bf16.py fixtures > "$log" 2>&1
count $? bf16

build/venv/bin/python test/quants.py ${CI:+--seed 3} > "$log" 2>&1
count $? quants

build/venv/bin/python test/python.py > "$log" 2>&1
count $? python

build/venv/bin/python reference/chats.py --answers build/answers.jsonl --count 2000 --seed "$seed" > "$log" 2>&1 && build/test_chat compare build/answers.jsonl > "$log" 2>&1
count $? answers
if [ -d "${SHARED:-none}/templates" ]; then
    build/venv/bin/python reference/chats.py "$SHARED/templates" build/chats.jsonl --count 2000 --seed "$seed" > "$log" 2>&1 && build/test_chat compare build/chats.jsonl > "$log" 2>&1
    count $? chats
else
    echo "skipped: random chats: Google's templates are not in $SHARED/templates"
    skipped=$((skipped + 1))
fi

"$PYTHON" test/terminal.py --program build/san/gemma4 > "$log" 2>&1
count $? terminal

build/venv/bin/python test/server.py --program build/san/gemma4 ${CI:+--seed 3} > "$log" 2>&1
count $? server

echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
