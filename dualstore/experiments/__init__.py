"""The experiments of the papers: what trains and records them, and what is measured on the stores."""
