"""The measuring tools of `octavo bench`. They drive an engine or a URL from outside, and every number they print goes
into a file with what it was measured on. Nothing else imports this room but its command.
"""
