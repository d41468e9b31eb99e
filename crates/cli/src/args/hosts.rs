//! `verbatim hosts`.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
pub struct HostsArguments {
    /// The folder to fill. Keep it where only you read it: it has the key of the certificate authority.
    #[arg(value_name = "FOLDER")]
    pub folder: PathBuf,
    /// The hosts: their names, and the addresses at which their agents listen and their RNICs are.
    #[arg(value_name = "NAME=ADDRESS", required_unless_present = "client", value_parser = host)]
    pub hosts: Vec<(String, IpAddr)>,
    /// Memory may go between these hosts without encryption, where a migration leaves that to the list (--memory-transport auto).
    #[arg(long)]
    pub trusted_network: bool,
    /// Make a certificate for a client of volumes over the network (`verbatim volume daemon --nbd-port`) that
    /// is not a host, in clients/NAME of the folder. May be given more than once.
    #[arg(long, value_name = "NAME", value_parser = name)]
    pub client: Vec<String>,
}

fn host(text: &str) -> Result<(String, IpAddr), String> {
    let wrong = || format!("{text:?} is not NAME=ADDRESS, such as host1=10.0.0.1");
    let (name, address) = text.split_once('=').ok_or_else(wrong)?;
    let name = self::name(name)?;
    Ok((name, address.parse().map_err(|_| wrong())?))
}

/// Checks a name, which becomes a folder's name and is put into a certificate.
fn name(name: &str) -> Result<String, String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
    if !name.starts_with(|c: char| c.is_ascii_alphanumeric()) || !name.chars().all(plain) {
        return Err(format!(
            "{name:?} is no host name: letters, digits, - and . are allowed"
        ));
    }
    Ok(name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_have_names_and_addresses() {
        let address = "10.0.0.1".parse().unwrap();
        assert_eq!(
            host("host1.rack=10.0.0.1"),
            Ok(("host1.rack".to_owned(), address))
        );
        assert!(host("a=fd00::1").is_ok());
        for bad in ["", "a", "a=", "a=b", "=10.0.0.1", "../a=10.0.0.1", "a/b=10.0.0.1"] {
            assert!(host(bad).is_err(), "{bad}");
        }
    }
}
