#!/usr/bin/env bash
# Builds what a release publishes, of the commit that is checked out, into the new directory $1: sdist and wheel,
# the chart, the image's build context, what the images install (CycloneDX), and the sums. Another run writes the
# same bytes: files come from git with the commit's time, and the builders are pinned (`make dist` brings them).
set -euo pipefail
umask 022
cd "$(dirname "$0")/.."
tools=$PWD/.venvs/dist/bin helm=$PWD/build/kubernetes/helm
for builder in "$tools/cyclonedx-py" "$helm"; do
  [ -x "$builder" ] || { echo "$builder is missing: make dist brings it" >&2; exit 1; }
done
mkdir "$1"
out=$(realpath "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH TZ=UTC LC_ALL=C.UTF-8
archive() { git -c tar.umask=0022 archive HEAD "$@"; }

mkdir "$work/source" "$work/made" "$work/sdist"
archive | tar -x --no-same-owner --no-same-permissions -C "$work/source"
while read -r project; do
  "$tools/python" -m build --no-isolation --outdir "$work/made" "$project"
done < <(find "$work/source" -name pyproject.toml -printf '%h\n' | sort)
mv "$work"/made/*.whl "$out"
for made in "$work"/made/*.tar.gz; do # setuptools writes the time of the build into it
  name=$(basename "$made" .tar.gz)
  tar -xzf "$made" --no-same-owner --no-same-permissions -C "$work/sdist"
  tar -c --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --format=posix \
    --pax-option='exthdr.name=%d/PaxHeaders/%f,delete=atime,delete=ctime' -C "$work/sdist" "$name" |
    gzip -9n > "$out/$name.tar.gz"
done

"$helm" package -d "$out" "$work/source/deploy/helm/ecd"
version=$(basename "$out"/encoder_cache_daemon-*.tar.gz .tar.gz)
version=${version##*-}
mapfile -t let_in < <(sed -n 's/^!//p' .dockerignore)
archive .dockerignore deploy/docker "${let_in[@]}" | gzip -9n > "$out/ecd-image-$version.tar.gz"
for variant in cpu cuda; do
  "$tools/python" -W ignore -m cyclonedx_py requirements --output-reproducible --pyproject "$work/source/pyproject.toml" \
    -o "$out/ecd-image-$version-$variant.cdx.json" "$work/source/deploy/docker/requirements-$variant.txt"
done
cd "$out"
sha256sum -- * > "$work/sums"
mv "$work/sums" SHA256SUMS
cat SHA256SUMS
