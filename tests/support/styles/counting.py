"""A torch.compile backend that counts the graphs it is given, and Dynamo's own figures."""

from torch._dynamo.utils import counters

graphs = []


def backend(graph_module, example_inputs):
    graphs.append(len(graph_module.graph.nodes))
    return graph_module.forward


def report():
    """Print what must be the same when somebody watches: graphs, their nodes, and graph breaks."""
    print("graphs", len(graphs), "nodes", graphs)
    print("breaks", sum(counters["graph_break"].values()))
    print("frames", sorted(counters["frames"].items()), "stats", sorted(counters["stats"].items()))
