//! Serves one volume, in memory, in a file or nowhere, for measurements.
//!
//! `iscsi-serve ADDRESS SIZE_MIB [null | FILE [inline]]` prints the URL and serves until its standard input ends;
//! a line with a number on standard input grows the volume to so many MiB.

use std::error::Error;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use trellis_iscsi::{Access, Server, ServerConfig, Target};
use trellis_test_luns::{FileLun, NullLun, RamLun};

const NAME: &str = "iqn.2026-11.dev.trellis:serve";
const MIB: u64 = 1 << 20;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let usage = "usage: iscsi-serve ADDRESS:PORT SIZE_MIB [null | FILE [inline]]";
    let address: SocketAddr = args.next().ok_or(usage)?.parse()?;
    let size: u64 = args.next().ok_or(usage)?.parse::<u64>()? * MIB;
    let file = args.next();
    let inline = args.next().is_some_and(|word| word == "inline");

    let server = Server::bind(address, ServerConfig::default())?;
    let target = Target::new(NAME, Access::default())?;
    let grow: Box<dyn Fn(u64) + Send + Sync> = match file {
        Some(word) if word == "null" => {
            let lun = Arc::new(NullLun::new("null", size));
            target.add_unit(0, lun.clone())?;
            Box::new(move |size| lun.grow(size))
        }
        Some(path) => {
            let lun = Arc::new(FileLun::open(Path::new(&path), size, 512, inline)?);
            target.add_unit(0, lun.clone())?;
            Box::new(move |size| {
                if let Err(error) = lun.grow(size) {
                    eprintln!("cannot grow: {error}");
                }
            })
        }
        None => {
            let lun = Arc::new(RamLun::new("ram", size, 512));
            target.add_unit(0, lun.clone())?;
            Box::new(move |size| lun.grow(size))
        }
    };
    server.portal().add_target(target)?;
    println!("iscsi://{}/{NAME}/0", server.local_addr());

    tokio::task::spawn_blocking(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            if let Ok(mib) = line.trim().parse::<u64>() {
                grow(mib * MIB);
            }
        }
    })
    .await?;
    server.stop().await;
    Ok(())
}
