"""Where the chunks of stored arrays lie, so that tests can exchange them."""

from itertools import combinations

import tensorstore as ts


def chunks_in(database):
    """(file, offset, size) of each chunk that has a place of its own, by key."""
    base = ts.KvStore.open({"driver": "file", "path": f"{database}/"}).result()
    root = ts.ocdbt.dump(base).result()["versions"][-1]["root"]["location"]
    found = {}
    for entry in ts.ocdbt.dump(base, root).result()["entries"]:
        if "indirect_value" in entry:
            _, under, name, offset, size = entry["indirect_value"].split(":")
            found[entry["key"].decode()] = database / under / name, int(offset), int(size)
    return found


def content_of(chunk):
    """Its bytes, checksums included."""
    path, offset, size = chunk
    return path.read_bytes()[offset : offset + size]


def put(chunk, content):
    """Other bytes in its place."""
    path, offset, _ = chunk
    whole = path.read_bytes()
    path.write_bytes(whole[:offset] + content + whole[offset + len(content) :])


def pairs_in(*databases):
    """Pairs of chunks of one size that hold different bytes."""
    chunks = [chunk for database in databases for chunk in chunks_in(database).values()]
    same = ((one, other) for one, other in combinations(chunks, 2) if one[2] == other[2])
    return [pair for pair in same if content_of(pair[0]) != content_of(pair[1])]


def exchange(one, other):
    """Each chunk in the other's place."""
    first, second = content_of(one), content_of(other)
    put(one, second)
    put(other, first)
