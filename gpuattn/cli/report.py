import click


@click.command("report")
def command():
    pass
