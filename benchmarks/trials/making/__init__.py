"""How the data are made: what is tried (`cells`, `plans`, `clusters`), and the runs that fill a journal (`collect`,
`calibrate`). Nothing here is needed to read them."""
