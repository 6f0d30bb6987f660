"""The user's own model: what it holds, what must stay as it was, and running it as it is without leaving a trace."""
