"""Extensions as others would write them, each in the files that it names and with no edit elsewhere."""
