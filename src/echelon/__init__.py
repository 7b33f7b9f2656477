"""echelon trains language models across processes, GPUs and machines: Recipe -> Plan -> Run."""

__version__ = "0.1.0"
