# gemma4.bash - completion of gemma4 in bash, 3.2 or newer: `source` it, or put it where bash-completion looks; `make install` does.
#
# It has no list of commands and options: it asks the program that is being typed, by `gemma4 help` and `gemma4 help COMMAND`, and reads the lines
# (test/test_manual.c compares). Only what the words for values mean is known here.

_gemma4_reply() { # the arguments are compgen's
    local line
    while IFS= read -r line; do COMPREPLY+=("$line"); done < <(compgen "$@")
}

_gemma4_files() {
    compopt -o filenames 2>/dev/null
    _gemma4_reply -f -- "$1"
}

_gemma4() {
    local IFS=$' \t\n' program=${COMP_WORDS[0]} cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]} equals='' help line commands names='' value=''
    local option='^  (-[a-z],|   ) (--[a-z0-9-]+)( ([^ ]+)|\[=([^ ]+)\])?  ' # "  -f, --file FILE  ", "      --profile[=FILE]  "
    COMPREPLY=()
    [[ $program == '~/'* ]] && program=$HOME/${program#'~/'}
    commands=$("$program" help 2>/dev/null | sed -n 's/^  \([a-z][a-z0-9-]*\)  .*/\1/p')
    if ((COMP_CWORD == 1)); then
        _gemma4_reply -W "$commands" -- "$cur"
        return
    fi
    if [[ $cur == = ]]; then # --name=value comes as three words
        equals=1 cur=''
    elif [[ $prev == = ]]; then
        equals=1 prev=${COMP_WORDS[COMP_CWORD - 2]}
    fi

    help=$("$program" help "${COMP_WORDS[1]}" 2>/dev/null)
    while IFS= read -r line; do
        [[ $line =~ $option ]] || continue
        names+=${BASH_REMATCH[2]}$'\n'
        if [[ $prev == "${BASH_REMATCH[2]}" || $prev, == "${BASH_REMATCH[1]}" ]]; then
            value=${BASH_REMATCH[4]}
            [[ $equals ]] && value+=${BASH_REMATCH[5]}
        fi
    done <<< "$help"

    line=${help%%$'\n'*} # gemma4 COMMAND [MODEL] ...
    case $prev-$value in
    *-FILE) _gemma4_files "$cur" ;;
    --backend-*) _gemma4_reply -W "$("$program" run --backend list 2>/dev/null | sed -n 's/^\([a-z0-9_]*\) .*/\1/p')" -- "$cur" ;;
    *'|'*) _gemma4_reply -W "${value//[A-Z|]/ }" -- "$cur" ;; # what is in capitals is not meant literally
    *-)
        if [[ $cur == -* ]]; then
            _gemma4_reply -W "$names" -- "$cur"
        elif [[ $line == *' [COMMAND]'* ]]; then
            _gemma4_reply -W "$commands" -- "$cur"
        elif [[ $line == *' A B '* || $line == *' [MODEL]'* && $COMP_CWORD == 2 ]]; then
            _gemma4_files "$cur"
        fi ;;
    esac
}

complete -F _gemma4 gemma4
