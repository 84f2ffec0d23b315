"""How a matrix is cut: segments follow from the shape alone, slices from the threads too."""

import pytest

from thinfer.engine.plan import chunk_outputs, segment_count


@pytest.mark.parametrize(
    ("inputs", "outputs", "segments", "two_threads", "sixty_four"),
    [
        (4096, 22016, 4, 22016, 2240),
        (11008, 4096, 8, 4096, 2048),
        (1536, 17920, 2, 8960, 2240),
        (8960, 1536, 8, 1536, 1536),
        (4096, 4095, 8, 4096, 2048),
        (4096, 4096, 4, 4096, 2048),
        (200, 4096, 1, 2048, 2048),
        (200, 64, 1, 64, 64),
    ],
)
def test_a_shape_is_cut(inputs, outputs, segments, two_threads, sixty_four):
    assert segment_count(inputs, outputs) == segments
    assert chunk_outputs(outputs, 4, segments, 2) == two_threads
    assert chunk_outputs(outputs, 4, segments, 64) == sixty_four
