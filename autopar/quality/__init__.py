"""What lossy synchronization costs in quality: measured on a user's own model, predicted, and held to a budget."""
