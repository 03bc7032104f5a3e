# click's own code for bash omits files where there is another candidate, and none of click's shells
# has a type for scripts. Code that can complete scripts says so by COMP_SCRIPTS.
%(complete_func)s() {
    local type value file
    COMPREPLY=()
    while IFS=, read -r type value; do
        case "$type" in
            plain)
                COMPREPLY+=("$value")
                [[ "$value" != *= ]] || compopt -o nospace
                ;;
            file | dir)
                compopt -o filenames
                while IFS= read -r file; do
                    COMPREPLY+=("$file")
                done < <(compgen -A "${type/dir/directory}" -- "${COMP_WORDS[COMP_CWORD]#=}")
                ;;
            script)
                compopt -o filenames
                while IFS= read -r file; do
                    [[ ! "$file" == *.py && ! -d "$file" ]] || COMPREPLY+=("$file")
                done < <(compgen -f -- "${COMP_WORDS[COMP_CWORD]}")
                ;;
        esac
    done < <(
        env COMP_SCRIPTS=1 COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD="$COMP_CWORD" \
            %(complete_var)s=bash_complete "$1"
    )
}
complete -o nosort -F %(complete_func)s %(prog_name)s
