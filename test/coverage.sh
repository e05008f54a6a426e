#!/bin/sh
# coverage.sh - which lines of the sources the C tests run, by gcov: for each file the share of lines and of branches (taken at least once), then
# the lines that no test reaches, each group with the reason where there is one. Builds into build/coverage, without threads.
#
# The core is to stay above 95 % of lines. The exit status is 0 if it does, and if the tests pass.
set -u
CORE="gemma4 quants checkpoint gguf tokenizer sampler" REST="tracefile main"
B=build/coverage
log=$B/log

rm -rf $B
mkdir -p $B
# Why a line is not reached: FILE (. is any), a regular expression that matches the line's text, the reason.
cat > $B/reasons <<'END'
.|out of memory|memory runs out
.|no memory|memory runs out
.|no_memory[(]|memory runs out
gemma4|free[(]host[)];|memory runs out, or a device fails
gemma4|g4_state_close[(]s[)];|memory runs out
gemma4|from the device failed|a device fails
gemma4|to the device failed|a device fails
gemma4|does not fit the device|a device fails
checkpoint|!known|the system cannot tell about a file that it opened
checkpoint|address space of this machine|machines of 32 bits
checkpoint|it had %llu when it was opened|a file shrinks while it is read
tokenizer|is there twice, as|no duplicate key passes the JSON reader; for other formats of files
tokenizer|free[(]e.ids[)];|memory runs out
sampler|rounded up to total|a rounding of u * total that no known seed brings about
tracefile|free[(]header[)];|memory runs out
tracefile|cannot write|the disk is full
END

# Without those that look at another file, or at texts.
tests=$(cd test && ls test_*.c | sed -e 's/[.]c$//' -e /test_backend/d -e /test_manual/d -e /test_readme/d -e /test_ulp/d)

passed=0 failed=0
if ! make CC=gcc OPT="-O0 --coverage" ARCH= OPENMP=0 WERROR= B=$B OUT=$B/ TESTS="$(echo $tests)" SHARED="${SHARED:-none}" test > $log 2>&1; then
    grep -E '^FAILED|rror' $log
    failed=1
fi
grep '^skipped' $log
grep -E '^[0-9]+ passed, ' $log
for name in $CORE $REST; do
    gcov -b -o $B $name.c > $B/$name.txt 2>&1
    mv $name.c.gcov $B/ 2>/dev/null
    rm -f ./*.gcov
    # the figures of this file, not of the headers that it includes
    figures=$(awk -v file="'$name.c'" '$1 == "File" { mine = $2 == file } mine && /^Lines executed/ { split($2, a, ":"); lines = a[2]; n = $4 }
        mine && /^Taken at least once/ { split($4, a, ":"); taken = a[2] } END { print lines, n, taken }' $B/$name.txt)
    set -- $figures
    echo "$name.c: $1 of $2 lines, $3 of branches"
    awk -F: -v name=$name -v reasons=$B/reasons '
        BEGIN {
            while ((getline line < reasons) > 0) {
                split(line, part, "|")
                file[++n] = part[1]; pattern[n] = part[2]; reason[n] = part[3]
            }
        }
        # a line of gcov is "count: number: text"; calls and branches have lines of their own
        /^ *[0-9#=*-]+[*]?: *[0-9]+:/ {
            count = $1; number = $2 + 0
            gsub(/ /, "", count)
            text = $0
            sub(/^[^:]*:[^:]*:/, "", text)
            if (count == "-") next
            if (count != "#####" && count != "=====") { group = 0; next }
            why = ""
            for (i = 1; i <= n && why == ""; i++) if ((file[i] == "." || file[i] == name) && text ~ pattern[i]) why = reason[i]
            if (why == "" && group) why = last
            last = why; group = 1
            if (why == "") { unknown++ } else { known[why]++; where[why] = where[why] " " number; next }
            sub(/^ +/, "", text)
            printf "    %s.c:%d: %s\n", name, number, substr(text, 1, 120)
        }
        END {
            for (why in known) printf "    %d lines: %s (%s)\n", known[why], why, substr(where[why], 2, 100)
            if (unknown) printf "    %d lines without a reason\n", unknown
        }' $B/$name.c.gcov
    case " $CORE " in *" $name "*)
        if awk -v x="$1" 'BEGIN { exit !(x + 0 >= 95) }'; then passed=$((passed + 1)); else failed=$((failed + 1)) && echo "FAILED $name.c: below 95 % of lines"; fi ;;
    esac
done
echo "coverage: $passed passed, $failed failed, 0 skipped"
[ $failed -eq 0 ]
