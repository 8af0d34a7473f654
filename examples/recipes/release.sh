#!/bin/sh
# Release a version: build, test, publish. Start it again after whatever ended it: it goes on where it was.
#
#     sh release.sh VERSION
#
# Put your own commands into build, check and publish; what they write to stands for the world outside.
set -eu

version=$1
world=${WORLD:-.}

# One release at a time: without a lease in the environment, start again under one.
if [ "${AGENT_CHECKPOINT_SCOPE:-}" != release ]; then
    exec agent-checkpoint run release --init --ttl 30 --wait 600 -- sh "$0" "$version"
fi

build() { echo "built $version" >>"$world/builds.txt"; }
check() { grep -q "built $version" "$world/builds.txt"; }
# Refuses nothing: only who asks at most once is safe.
publish="echo 'published $version' >>'$world/published.txt'; echo 'https://example.org/$version'"

done_is() { agent-checkpoint checkpoint put "release-$version" --data "{\"done\": \"$1\"}" --field data.done; }

# 66: nothing is done yet.
reached=$(agent-checkpoint checkpoint get "release-$version" --field data.done 2>/dev/null) || test $? = 66
if [ -z "$reached" ]; then
    build
    reached=$(done_is built)
fi
if [ "$reached" = built ]; then
    check
    reached=$(done_is checked)
fi
# Exit 76: an earlier try began to publish, and nobody knows whether it did.
agent-checkpoint once "publish $version" --request "$version" -- sh -c "$publish"
