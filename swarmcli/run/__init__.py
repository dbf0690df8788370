"""All that is said of a run, once: values that the terminal, the dashboard and the verbs show."""
