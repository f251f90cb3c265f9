"""Lightning-indexer scores and the choice of the best entries."""
