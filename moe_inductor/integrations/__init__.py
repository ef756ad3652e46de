"""Adapters to other libraries, each a module that is imported only where its library is used."""
