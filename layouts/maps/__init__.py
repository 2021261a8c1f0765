"""Where every byte is: arena, messages, formats, scale factors; and what host and device agree on."""
