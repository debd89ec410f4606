"""Each benchmark prints a table, with its peers measured beside it in the same run."""
