"""Dense layers over collectives, embedding rows over servers."""
