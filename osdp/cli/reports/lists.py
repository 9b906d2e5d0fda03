"""What `osdp models` and `osdp clusters` print."""

from rich.console import Console

from osdp.cli.reports.figures import figures_of, format_parameters, format_rate
from osdp.cli.terminal import make_table, print_section, print_table
from osdp.zoo import cluster_names, load_cluster, model_card, model_names
from profiler.byte_sizes import format_bytes


def print_models(console: Console) -> None:
    table = make_table("model", ">parameters", ">tokens", "description")
    for name in model_names():
        card = model_card(name)
        parameters = "" if card.parameters is None else format_parameters(card.parameters)
        table.add_row(name, parameters, str(card.sequence_length), card.description)
    print_table(console, table)
    console.print()
    console.print("Also accepted: path/to/model.yaml, package.module:factory, path/to/file.py:factory, hf:...")


def print_clusters(console: Console, name: str | None, sources: bool) -> None:
    """Print the clusters that come with OSDP, or one; with `sources`, every figure of theirs."""
    found = {spec: load_cluster(spec) for spec in ([name] if name else cluster_names())}
    if sources:
        for cluster in found.values():
            table = make_table("figure", ">value", "source")
            for figure, value, source in figures_of(cluster):
                table.add_row(figure, value, source)
            print_section(console, f"{cluster.name}: {cluster.description}; {cluster.device.name}", table)
        return
    table = make_table("=cluster", ">ranks", ">memory", ">in a node", ">between", "description")
    for spec, cluster in found.items():
        inter = "" if cluster.inter is None else format_rate(cluster.inter.bytes_per_s.value, "B/s")
        intra = format_rate(cluster.intra.bytes_per_s.value, "B/s")
        memory = format_bytes(cluster.device.memory_bytes.value)
        ranks = f"{cluster.nodes} x {cluster.gpus_per_node}"
        table.add_row(spec, ranks, memory, intra, inter, cluster.description)
    print_table(console, table)
    console.print()
    console.print("Memory per device; bus bandwidth per rank. --sources lists where each figure comes from.")
