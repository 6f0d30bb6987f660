"""How the ranks of a job find each other, tell who is gone or late, and compare what they are about to do."""
