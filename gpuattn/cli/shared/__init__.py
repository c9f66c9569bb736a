"""What commands share: options, standard streams, lines of input, progress."""
