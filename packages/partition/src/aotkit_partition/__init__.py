from .errors import PartitionError
from .graph_text import dump_graph, graph_constants, load_graph
