import pytest

from thinfer.core.graph import Graph, Node, split_ffn
from thinfer.errors import UsageError

HIDDEN, NEURONS = 8, 80


def ffn_graph() -> Graph:
    nodes = (
        Node("embed", (), "x", ("e",)),
        Node("linear", ("x",), "gate_up", ("g", "u"), _linear("gate_up", ("gb", "ub"))),
        Node("gated_act", ("gate_up",), "act", (), {"act": "silu"}),
        Node("linear", ("act",), "down", ("d",), _linear("down", ("db",))),
        Node("add", ("x", "down"), "out"),
    )
    widths = {"x": HIDDEN, "gate_up": 2 * NEURONS, "act": NEURONS, "down": HIDDEN, "out": HIDDEN}
    return Graph(nodes, widths, "out")


def _linear(kind, biases):
    return {"site": f"layers.0.{kind}", "kind": kind, "layer": 0, "biases": biases}


@pytest.mark.parametrize(
    ("nodes", "buffers", "message"),
    [
        ((Node("conv", (), "x"),), {"x": 1}, "unknown op 'conv'"),
        ((Node("add", ("a", "a"), "x"),), {"x": 1}, "reads a before"),
        ((Node("embed", (), "x"), Node("embed", (), "x")), {"x": 1}, "written twice"),
        ((Node("embed", (), "x"),), {}, "no width"),
        ((Node("embed", (), "y"),), {"y": 1}, "logits buffer x"),
    ],
)
def test_invalid_graphs_are_refused(nodes, buffers, message):
    with pytest.raises(UsageError, match=message):
        Graph(nodes, buffers, "x")


def test_selected_names_all_buffers_after_select():
    nodes = (Node("embed", (), "x"), Node("select", ("x",), "y"), Node("rms_norm", ("y",), "z"))
    assert Graph(nodes, {"x": 1, "y": 1, "z": 1}, "z").selected() == {"y", "z"}


def test_split_for_an_exact_executor_and_a_grouping_one():
    ids = [70, 3, 40]
    split = split_ffn(ffn_graph(), 0, ids, "reference", column_groups={"cpu": 32})
    a, b = split.nodes[1:4], split.nodes[4:7]
    assert [n.executor for n in a] == ["reference"] * 3
    assert [n.executor for n in b] == ["cpu"] * 3
    assert a[0].attrs["rows"] == a[2].attrs["columns"] == (3, 40, 70)
    assert "ids" not in a[1].attrs
    assert split.buffers[a[0].output] == 6
    assert split.buffers[a[1].output] == 3

    kept = tuple(i for i in range(NEURONS) if i not in ids)
    assert b[0].attrs["rows"] == kept
    # All three groups of 32 hold a kept neuron; the last one is cut short by the matrix.
    assert b[2].attrs["columns"] == tuple(range(NEURONS))
    assert b[1].attrs["ids"] == kept
    assert b[1].attrs["width"] == split.buffers[b[1].output] == NEURONS

    assert a[2].attrs["biases"] == ("",)
    assert b[2].attrs["biases"] == ("db",)
    join = split.nodes[7]
    assert (join.op, join.inputs, join.output) == ("add", (a[2].output, b[2].output), "down")


def test_whole_groups_need_no_scatter():
    split = split_ffn(ffn_graph(), 0, range(32), "reference", column_groups={"cpu": 32})
    act, down = split.nodes[5:7]
    assert down.attrs["columns"] == tuple(range(32, 80))
    assert "ids" not in act.attrs
    assert split.buffers[act.output] == 48


def test_an_ffn_without_a_gate_is_split_too():
    nodes = (
        Node("embed", (), "x", ("e",)),
        Node("linear", ("x",), "up", ("u",), _linear("up", ("",))),
        Node("act", ("up",), "act", (), {"act": "relu2"}),
        Node("linear", ("act",), "down", ("d",), _linear("down", ("",))),
    )
    graph = Graph(nodes, {"x": HIDDEN, "up": NEURONS, "act": NEURONS, "down": HIDDEN}, "down")
    split = split_ffn(graph, 0, [3, 70], column_groups={})
    assert [node.op for node in split.nodes] == ["embed", *["linear", "act", "linear"] * 2, "add"]
    assert split.buffers["up.split"] == split.buffers["act.split"] == 2
    assert split.buffers["up.rest"] == NEURONS - 2


def test_groups_without_a_kept_neuron_are_left_out():
    moved = [i for i in range(NEURONS) if i != 33]
    act, down = split_ffn(ffn_graph(), 0, moved, column_groups={"cpu": 32}).nodes[5:7]
    assert down.attrs["columns"] == tuple(range(32, 64))
    assert act.attrs["ids"] == (1,)
    assert act.attrs["width"] == 32


@pytest.mark.parametrize("ids", [[], [0, 0], [-1], [NEURONS], range(NEURONS)])
def test_impossible_neuron_ids(ids):
    with pytest.raises(UsageError, match="distinct neuron ids"):
        split_ffn(ffn_graph(), 0, ids)


def test_a_layer_is_split_once_and_must_exist():
    with pytest.raises(UsageError, match="layer 1 has no whole"):
        split_ffn(ffn_graph(), 1, [0])
    with pytest.raises(UsageError, match="layer 0 has no whole"):
        split_ffn(split_ffn(ffn_graph(), 0, [0]), 0, [1])
