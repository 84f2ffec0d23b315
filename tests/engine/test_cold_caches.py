"""Whether weights come from memory or from a cache, as the choice of layouts asks it."""

from thinfer.engine.layout_choice import exceeds_caches


def caches(folder, *sizes):
    for index, size in enumerate(sizes):
        (folder / f"index{index}").mkdir()
        (folder / f"index{index}" / "size").write_text(size + "\n", encoding="ascii")
    return folder


def test_the_largest_cache_decides(tmp_path):
    found = caches(tmp_path, "48K", "2048K", "32M")
    assert exceeds_caches(33 << 20, found)
    assert not exceeds_caches(32 << 20, found)


def test_unknown_caches_count_as_none(tmp_path):
    assert exceeds_caches(1, tmp_path)
    assert exceeds_caches(1, caches(tmp_path, "large"))
