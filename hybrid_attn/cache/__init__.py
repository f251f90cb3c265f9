"""The five-state cache: states, spec, spans, rings and the byte ledger."""
