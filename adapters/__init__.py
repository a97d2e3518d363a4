"""How other libraries' arrays come in and go out; each module imports only its own library."""
