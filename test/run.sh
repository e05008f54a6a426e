#!/bin/sh
# run.sh GEMMA4 PROGRAM... - runs the test programs, each with the path of ./gemma4 as argument, and adds up their last lines. The exit status is 0 only if checks were made and none failed.
# A program that dies, or ends without its line, is one failure.
# threads that spin while they wait take the processor from whatever else this machine does
export OMP_WAIT_POLICY=passive
gemma4=$1 passed=0 failed=0 skipped=0
shift
out=$(mktemp) || exit 2
trap 'rm -f "$out"' EXIT
for program; do
    "./$program" "./$gemma4" > "$out" 2>&1
    status=$?
    line=$(tail -n 1 "$out" | sed -n 's/^[a-z_0-9]*: \([0-9]*\) passed, \([0-9]*\) failed, \([0-9]*\) skipped$/\1 \2 \3/p')
    if [ -z "$line" ]; then
        cat "$out"
        echo "FAILED $program: ended with status $status and without a result"
        failed=$((failed + 1))
        continue
    fi
    cat "$out"
    set -- $line
    passed=$((passed + $1)) failed=$((failed + $2)) skipped=$((skipped + $3))
    if [ "$status" -ne 0 ] && [ "$2" -eq 0 ]; then
        echo "FAILED $program: status $status"
        failed=$((failed + 1))
    fi
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
