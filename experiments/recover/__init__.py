"""The life of a cache under faults: flips, reuse, rebuilds, crashes and their cost."""
