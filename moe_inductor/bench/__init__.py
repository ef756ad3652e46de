"""``megamoe bench``: one layer, decoding and a model step, each against peers in the same process, as JSON; tables and
plots are drawn from the JSON. Files under ``results/`` are the ones that documents quote."""
