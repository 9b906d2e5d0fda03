"""Trace all models of the zoo and write the graphs that come with OSDP, to configs/graphs; takes half a minute.

    python scripts/trace_zoo.py

To be run with the version of PyTorch in constraints.txt whenever the tracer has changed; a test says so.
"""

from osdp.planning.zoo_graphs import DEVICE_TYPE, PRECISIONS, write_zoo_graphs
from osdp.zoo import load_model, model_names
from profiler.trace.trace import trace_model


def main() -> None:
    graphs = {}
    for name in model_names():
        for precision in PRECISIONS:
            print(f"{name} {precision}", flush=True)
            graphs[name, precision] = trace_model(load_model(name), precision, DEVICE_TYPE)
    write_zoo_graphs(graphs)


if __name__ == "__main__":
    main()
