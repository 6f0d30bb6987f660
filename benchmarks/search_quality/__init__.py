"""How good the plans are that the search finds: beside the best there is, beside random plans, beside a hundred times
the budget, and as measured in the lab."""
