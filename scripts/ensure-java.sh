#!/bin/sh
# Finds a Java that Spark can run on and prints its home on standard output; all messages go to standard error.
# --quiet: print no message if one is found.
# Searches JAVA_HOME, then PATH, then the usual folders. As root with apt-get it installs one if none is found.
set -eu

MINIMUM=17
quiet=no
if [ "${1:-}" = --quiet ]; then quiet=yes; fi

say() { printf '%s\n' "$*" >&2; }

# major_of "1.8" -> 8, "17" -> 17
major_of() {
    version=${1#1.}
    printf '%s\n' "${version%%[!0-9]*}"
}

# probe JAVA: sets home and major. Fails if the program does not run or is too old.
probe() {
    home= major=
    [ -x "$1" ] || return 1
    properties=$("$1" -XshowSettings:properties -version 2>&1) || return 1
    home=$(printf '%s\n' "$properties" | sed -n 's/^ *java\.home = //p')
    major=$(major_of "$(printf '%s\n' "$properties" | sed -n 's/^ *java\.specification\.version = //p')")
    [ -n "$home" ] && [ -n "$major" ] && [ "$major" -ge "$MINIMUM" ]
}

found() {
    [ "$quiet" = yes ] || say "java: $major at $home"
    printf '%s\n' "$home"
    exit 0
}

search() {
    if [ -n "${JAVA_HOME:-}" ]; then
        if probe "$JAVA_HOME/bin/java"; then found; fi
        say "java: JAVA_HOME ($JAVA_HOME) has no Java $MINIMUM or newer, searching further"
    fi
    if on_path=$(command -v java) && probe "$on_path"; then found; fi
    # If several are installed, prefer the versions that Spark is tested with.
    for wanted in 17 21 any; do
        for folder in /usr/lib/jvm/* /Library/Java/JavaVirtualMachines/*/Contents/Home; do
            if probe "$folder/bin/java" && { [ "$wanted" = any ] || [ "$major" = "$wanted" ]; }; then found; fi
        done
    done
}

search

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    export DEBIAN_FRONTEND=noninteractive
    say "java: none found, installing with apt-get"
    apt-get update -qq >&2 || say "java: apt-get update failed, continuing with the present package lists"
    apt-get install -y -qq --no-install-recommends openjdk-17-jre-headless >&2 ||
        apt-get install -y -qq --no-install-recommends default-jre-headless >&2 ||
        say "java: apt-get could not install it"
    search
fi

say "java: Spark needs Java $MINIMUM or newer, and none was found."
say "  Debian, Ubuntu:  sudo apt-get install openjdk-17-jre-headless"
say "  Fedora, RHEL:    sudo dnf install java-17-openjdk-headless"
say "  macOS:           brew install --cask temurin@17"
say "Or set JAVA_HOME to an installed Java. Then run the same command again."
exit 1
